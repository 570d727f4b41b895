# syntax=docker/dockerfile:1
# Targets: cpu (default) and cuda.   docker build --target cuda -t truedraft:cuda .
# The base must have Debian's Python 3.11 or newer in apt. TORCH_INDEX is where the CPU build of torch is found.
ARG BASE=debian:bookworm-slim

FROM ${BASE} AS python
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 PATH=/opt/truedraft/bin:$PATH
# The compiler stays in the image: kernels are compiled for the machine's own processor at the first start.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev python3 \
    && rm -rf /var/lib/apt/lists/*

FROM python AS builder
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/truedraft
WORKDIR /src
COPY pyproject.toml constraints.txt ./
RUN python3 -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" \
    > requirements.txt

FROM builder AS build-cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" -c constraints.txt torch
# A layer of its own: torch changes less often than the rest.
# hadolint ignore=DL3059
RUN pip install --no-cache-dir -c constraints.txt -r requirements.txt
COPY . .
# Kernels for each kind of processor, used where nothing can be compiled, such as in a read-only container.
RUN pip install --no-cache-dir --no-deps . && python -P -m truedraft.engine.native.prebuilt

FROM builder AS build-cuda
# PyPI's torch for Linux brings the CUDA libraries along; the host needs the driver and NVIDIA's container toolkit.
RUN pip install --no-cache-dir -c constraints.txt -r requirements.txt
COPY . .
RUN pip install --no-cache-dir --no-deps . && python -P -m truedraft.engine.native.prebuilt

FROM python AS runtime
RUN groupadd --system --gid 10001 truedraft \
    && useradd --system --uid 10001 --gid 10001 --create-home truedraft \
    && install --directory --owner truedraft --group truedraft /cache
# Downloaded models and compiled kernels.
# hadolint ignore=DL3064
ENV HF_HOME=/cache/huggingface XDG_CACHE_HOME=/cache TRITON_CACHE_DIR=/cache/triton \
    TRUEDRAFT_HOST=0.0.0.0 TRUEDRAFT_PORT=8000
VOLUME /cache
WORKDIR /home/truedraft
USER 10001:10001
EXPOSE 8000
STOPSIGNAL SIGTERM
# Liveness. /ready is for load balancers: loading a large model takes minutes.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import os, ssl, urllib.request as r; e = os.environ; tls = e.get('TRUEDRAFT_SSL_CERTFILE') and ssl._create_unverified_context(); r.urlopen(f\"http{'s' if tls else ''}://127.0.0.1:{e['TRUEDRAFT_PORT']}/health\", timeout=4, context=tls or None)"]
ENTRYPOINT ["truedraft"]
CMD ["serve"]

FROM runtime AS cuda
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 0
# Triton compiles its launchers against Python's headers.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3-dev \
    && rm -rf /var/lib/apt/lists/*
USER 10001:10001
COPY --from=build-cuda /opt/truedraft /opt/truedraft

FROM runtime AS cpu
COPY --from=build-cpu /opt/truedraft /opt/truedraft
