# The CUDA install. The first build takes a while, most of it for TransformerEngine's extension:
#   docker build -t fp8rl .
#   docker run --rm --gpus all --ipc=host fp8rl                  # what runs here, and in which mode: fp8rl doctor
#   docker run --rm --gpus all --ipc=host fp8rl fp8rl train examples/arithmetic.yaml
# The CUDA release of torch's wheels in requirements/gpu.txt; with its nvcc SGLang makes some kernels as it starts.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04

# Triton compiles its launchers against Python's headers.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential libnuma1 python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home fp8rl && install --directory --owner=fp8rl --group=fp8rl /home/fp8rl/fp8rl
USER fp8rl
WORKDIR /home/fp8rl/fp8rl

# Apart from the code, so that a change of the code does not install them anew.
COPY --chown=fp8rl Makefile ./
COPY --chown=fp8rl requirements requirements
RUN PIP_NO_CACHE_DIR=1 make gpu-libraries PYTHON=python3.12

COPY --chown=fp8rl . .
RUN .venv-gpu/bin/python -m pip install --no-deps --no-build-isolation -e .

ENV PATH=/home/fp8rl/fp8rl/.venv-gpu/bin:$PATH
# Kernels of the demo's spec for Hopper, so that a first run compiles none; other specs: `fp8rl warm SPEC`.
RUN fp8rl warm examples/arithmetic.yaml || echo "No kernels were compiled: a first run compiles them."
CMD ["fp8rl", "doctor"]
