# The server with its default model inside, for CPUs or for NVIDIA GPUs.
#
#   docker build -t dspark-server .
#   docker build -t dspark-server:cuda --build-arg FLAVOUR=cuda .
#   docker run --rm -p 8000:8000 dspark-server                     # flags of `dspark serve` may follow
#   docker run --rm --entrypoint dspark dspark-server version      # any other command
#   docker run --rm -p 8000:8000 --read-only --cap-drop ALL --tmpfs /tmp \
#       -v dspark-profiles:/var/cache/dspark/profiles dspark-server
#
# Build arguments:
#   FLAVOUR       cpu, or cuda: PyTorch with CUDA, FlashInfer, its kernels compiled while the image is built
#   MODEL         default: the default model lies in the image; none: mount one, or the server fetches it into
#                 /var/cache/dspark, which then has to be a volume that user 10001 may write
#   PYTHON_IMAGE  what everything stands on; name one by its digest for builds that never change
#   CUDA_IMAGE    where the cuda flavour's compiler comes from
#   CUDA_ARCHS    for which GPUs kernels are compiled
#   REVISION, CREATED, VERSION  for the labels

ARG FLAVOUR=cpu
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
ARG CUDA_IMAGE=nvidia/cuda:13.0.2-devel-ubuntu22.04


FROM ${PYTHON_IMAGE} AS builder
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
WORKDIR /src
ENV PIP_NO_CACHE_DIR=1 PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# A compiler for the kernels; it stays behind in this stage. Its version is the distribution's.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/dspark
ENV PATH=/opt/dspark/bin:$PATH


# The packages have layers of their own, so that a change to the code does not install them again.
FROM builder AS packages-cpu
# PyTorch's builds for CPUs are not on PyPI: a version, but no hash that would hold for every processor.
RUN pip install --no-deps --extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu
COPY requirements/image-cpu.txt requirements/
RUN pip install --no-deps --require-hashes -r requirements/image-cpu.txt


FROM ${CUDA_IMAGE} AS cuda


FROM builder AS packages-cuda
COPY requirements/image-cuda.txt requirements/
RUN pip install --no-deps --require-hashes -r requirements/image-cuda.txt
COPY --from=cuda /usr/local/cuda /usr/local/cuda
COPY scheduler scheduler
COPY engine engine
COPY deploy/gpu deploy/gpu
# Compiled here, and found in the environment at run time: the first request waits for no compiler.
ARG CUDA_ARCHS=9.0a
RUN CUDA_HOME=/usr/local/cuda FLASHINFER_CUDA_ARCH_LIST="$CUDA_ARCHS" python -m deploy.gpu.warm_kernels --windows


# hadolint ignore=DL3006
FROM packages-${FLAVOUR} AS installed
WORKDIR /src
COPY pyproject.toml README.md LICENSE setup.py ./
COPY scheduler scheduler
COPY engine engine
COPY drafters drafters
COPY server server
COPY loadtest loadtest
RUN pip install --no-cache-dir --no-deps --no-build-isolation .
ARG MODEL=default
ENV DSPARK_CACHE=/var/cache/dspark
RUN mkdir -p "$DSPARK_CACHE/models" "$DSPARK_CACHE/profiles" \
    && if [ "$MODEL" = default ]; then python -c 'from engine.models.blocks import load_blocks; \
from engine.models.locate import cache_folder, locate_model; \
next(load_blocks(locate_model(None, cache_folder(), print)))'; fi


FROM ${PYTHON_IMAGE}
ARG VERSION=0.1.0
ARG REVISION=unknown
ARG CREATED=unknown
LABEL org.opencontainers.image.title="dspark-server" \
      org.opencontainers.image.description="Async LLM inference server with DSpark speculative decoding" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION" \
      org.opencontainers.image.created="$CREATED"

RUN groupadd --gid 10001 dspark \
    && useradd --uid 10001 --gid 10001 --create-home --shell /usr/sbin/nologin dspark
COPY --from=installed /opt/dspark /opt/dspark
COPY --from=installed --chown=10001:10001 /var/cache/dspark /var/cache/dspark

# FlashInfer writes a log when it is imported, and has no compiler here.
ENV PATH=/opt/dspark/bin:$PATH \
    DSPARK_CACHE=/var/cache/dspark \
    DSPARK_PORT=8000 \
    FLASHINFER_WORKSPACE_BASE=/tmp \
    FLASHINFER_DISABLE_JIT=1 \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /home/dspark
EXPOSE 8000

# No proxy in between, whatever the environment says. A port set by --port is not known here: use DSPARK_PORT.
HEALTHCHECK --interval=15s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as u; u.build_opener(u.ProxyHandler({})).open(f'http://127.0.0.1:{os.environ[\"DSPARK_PORT\"]}/health', timeout=4)"]

# The server is process 1 and gets SIGTERM itself: requests under way get --shutdown-timeout seconds.
STOPSIGNAL SIGTERM
ENTRYPOINT ["dspark", "serve", "--host", "0.0.0.0"]
