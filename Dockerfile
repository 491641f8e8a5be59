# The image of `eagle3 jobs render --for kubernetes`: this package with its pinned dependencies.
#
#   docker build -t eagle3 .
#   docker build -t eagle3:cpu --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .
FROM python:3.11-slim-bookworm

# Triton and the decoder's CPU kernels are compiled where they run.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*

ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1

# torch first and alone, so that the index applies to nothing else; the pin is the Makefile's. The
# default is the build with CUDA.
WORKDIR /build
COPY constraints.txt ./
ARG TORCH_INDEX=
RUN pip install --no-deps ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} -c constraints.txt torch==2.13.0

# The dependencies do not change when the code does: they are a layer of their own.
COPY pyproject.toml README.md LICENSE ./
COPY pipeline/__init__.py pipeline/
RUN pip install -c constraints.txt '.[synth,dlp,gguf,gcs,ray,train,metrics,serve]' && pip uninstall --yes eagle3
COPY pipeline pipeline
RUN pip install --no-deps . && rm -rf /build/*

# A number, which Kubernetes can see is not root; jobs get a HOME that it may write to.
USER 10001:10001
WORKDIR /tmp
ENTRYPOINT ["eagle3"]
CMD ["--help"]
