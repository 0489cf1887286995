#!/usr/bin/env bash
# Builds the CPU image without a Docker daemon and tries it: needs root, buildah and debootstrap (Debian packages).
#
#   [BASE=FOLDER] deploy/image/build_check.sh [buildah's flags for the build, such as --volume or --build-arg]
#
# BASE is where the base system is kept for the next time (default: nowhere).
#
# The real Dockerfile is built by buildah; only the base image is a stand-in, a small Debian made here, since that may
# be had where no registry of images can be reached. Then the image runs as it would: as its own user, on a read-only
# root with a volume for profiles, asked by its own health check, answering a request, ending on SIGTERM.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
[ "$(id -u)" = 0 ] || { echo "build_check: needs root" >&2; exit 1; }

work=$(mktemp -d)
# Nothing is left behind, and no storage of the host's own is touched.
export STORAGE_DRIVER=vfs BUILDAH_ISOLATION=chroot
buildah() { command buildah --root "$work/storage" --runroot "$work/run" "$@"; }
container=
server=
finish() {
  [ -z "$server" ] || kill "$server" 2>/dev/null || true
  if mountpoint -q "$work/mounted"; then umount -R "$work/mounted"; fi
  [ -z "$container" ] || buildah rm "$container" >/dev/null || true
  rm -rf --one-file-system "$work"
}
trap finish EXIT
say() { printf 'build_check: %4d s: %s\n' "$SECONDS" "$*"; }

say "making a base image"
root=${BASE:-$work/base}
if [ ! -e "$root/usr/bin/python3" ]; then
  debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv bookworm "$root" >"$work/log" ||
    { tail -5 "$work/log" >&2; exit 1; }
fi
cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/" # the host's, whatever it trusts
ln -sf python3 "$root/usr/bin/python"
base=$(buildah from scratch)
buildah add -q "$base" "$root" / >/dev/null
buildah commit -q "$base" localhost/base >/dev/null
buildah rm "$base" >/dev/null
rm -rf --one-file-system "$work/base"

say "building the Dockerfile"
# This old a buildah does not see that a stage named by an argument is one of ours.
sed 's/packages-${FLAVOUR}/packages-cpu/' Dockerfile >"$work/Dockerfile"
buildah build --format docker --file "$work/Dockerfile" --build-arg PYTHON_IMAGE=localhost/base "$@" --tag localhost/dspark-server .

container=$(buildah from --pull-never localhost/dspark-server)
root=$(buildah mount "$container")
say "the image is $(du -sm "$root" | cut -f1) MB; trying it"
ask() { buildah inspect --type image --format "$1" localhost/dspark-server; }
user=$(ask '{{.Docker.Config.User}}')
[ "$user" = 10001:10001 ]
[ -n "$(ask '{{.Docker.Config.Healthcheck}}')" ]

# What an engine's --read-only, --tmpfs /tmp and a volume at profiles do.
mkdir -p "$work/mounted" "$work/profiles"
chown 10001:10001 "$work/profiles"
mount --bind "$root" "$work/mounted"
mount -o remount,ro,bind "$work/mounted"
mount -t tmpfs -o mode=1777 tmpfs "$work/mounted/tmp"
mount --bind "$work/profiles" "$work/mounted/var/cache/dspark/profiles"
mount --bind /dev "$work/mounted/dev"
mount -t proc proc "$work/mounted/proc"
port=${PORT:-18990}
inside=(
  chroot "--userspec=$user" "$work/mounted" /usr/bin/env -i HOME=/home/dspark PATH=/opt/dspark/bin:/usr/bin:/bin
  DSPARK_CACHE=/var/cache/dspark "DSPARK_PORT=$port" PYTHONDONTWRITEBYTECODE=1
)
if "${inside[@]}" touch /var/cache/dspark/models/x 2>/dev/null; then echo "the root can be written" >&2; exit 1; fi
"${inside[@]}" dspark serve --host 127.0.0.1 --shutdown-timeout 5 &
server=$!
curl -sf --retry 120 --retry-all-errors --retry-delay 1 "http://127.0.0.1:$port/ready"
echo
"${inside[@]}" python -c "$(ask '{{index .Docker.Config.Healthcheck.Test 3}}')"
curl -sf "http://127.0.0.1:$port/v1/completions" -H 'Content-Type: application/json' \
  -d '{"prompt": "One, two, three,", "max_tokens": 12, "temperature": 0}'
echo
ls "$work/profiles"
kill -TERM "$server"
code=0
wait "$server" || code=$?
server=
[ "$code" = 0 ] || { echo "exit code $code" >&2; exit 1; }
say "passed: built, ready on a read-only root as user $user, healthy, answered, ended with code 0"
