# The server for CPUs with its default model inside: what `make serve` runs.
#
#   docker build -t dspark-server .
#   docker run --rm -p 8000:8000 dspark-server                     # flags of `dspark serve` may follow
#   docker run --rm --entrypoint dspark dspark-server --help       # any other command
#
# Build arguments: PREFETCH=0 leaves the default model out (the server then fetches it when it starts);
# TORCH=cuda takes the PyTorch build with CUDA; REVISION and CREATED go into the labels.

FROM python:3.11-slim AS build
WORKDIR /src
ENV PIP_NO_CACHE_DIR=1 VENV=/opt/dspark
# A compiler for the native kernels; it stays behind in this stage.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

# The dependencies have a layer of their own, so that a change to the code does not install them again.
ARG TORCH=cpu
COPY pyproject.toml ./
COPY requirements requirements
COPY deploy/make_env.sh deploy/
RUN bash deploy/make_env.sh deps

COPY README.md LICENSE setup.py ./
COPY scheduler scheduler
COPY engine engine
COPY drafters drafters
COPY server server
COPY loadtest loadtest
RUN /opt/dspark/bin/pip install --no-deps --no-build-isolation .

ARG PREFETCH=1
ENV DSPARK_CACHE=/var/cache/dspark
RUN mkdir -p "$DSPARK_CACHE" && if [ "$PREFETCH" = 1 ]; then /opt/dspark/bin/python -c \
    'from engine.models.locate import default_cache_dir, locate_model; locate_model(None, default_cache_dir(), print)'; fi


FROM python:3.11-slim
ARG VERSION=0.1.0
ARG REVISION=
ARG CREATED=
LABEL org.opencontainers.image.title="dspark-server" \
      org.opencontainers.image.description="Async LLM inference server with DSpark speculative decoding" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION" \
      org.opencontainers.image.created="$CREATED"

RUN groupadd --gid 10001 dspark && useradd --uid 10001 --gid 10001 --create-home --shell /usr/sbin/nologin dspark
COPY --from=build /opt/dspark /opt/dspark
COPY --from=build --chown=10001:10001 /var/cache/dspark /var/cache/dspark

ENV PATH=/opt/dspark/bin:$PATH \
    DSPARK_CACHE=/var/cache/dspark \
    DSPARK_HOST=0.0.0.0 \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /home/dspark
EXPOSE 8000

# No proxy in between, whatever the environment says.
HEALTHCHECK --interval=15s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import urllib.request as u; u.build_opener(u.ProxyHandler({})).open('http://127.0.0.1:8000/health', timeout=4)"]

# The server is process 1 and gets SIGTERM itself. The health check asks port 8000: to have another one
# outside, publish it under another number.
STOPSIGNAL SIGTERM
ENTRYPOINT ["dspark", "serve"]
