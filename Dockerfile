# docker build -t onefile . && docker run -it onefile make demo
# For CUDA: docker build --build-arg CUDA=1 -t onefile . && docker run -it --gpus all --ipc host onefile make demo
FROM python:3.11-slim
ARG CUDA=
# A compiler and libnuma for vLLM.
RUN apt-get update && apt-get install -y --no-install-recommends git make patch g++ libnuma1 \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /onefile
COPY . .
# A build sees no GPU, so `make install` would choose the packages for a CPU.
RUN if [ -n "$CUDA" ]; then python -m venv .venv && .venv/bin/pip install '.[vllm,dev]' && touch .venv/installed; \
    else make install; fi
ENV PATH=/onefile/.venv/bin:$PATH
