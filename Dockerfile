# docker build --target light -t stagebridge .        the converter: no torch
# docker build --target full -t stagebridge:full .    with the native engine, DeepSpeed and Megatron-Core, on CPU
# docker run --rm -v "$PWD:/work" stagebridge check .
FROM python:3.11-slim AS light
COPY pyproject.toml README.md LICENSE constraints.txt /source/
COPY bridge /source/bridge
COPY compat /source/compat
RUN apt-get update && apt-get install --no-install-recommends -y git && rm -rf /var/lib/apt/lists/* \
    && pip install --no-cache-dir -c /source/constraints.txt /source && rm -rf /source \
    && useradd --create-home user
USER user
WORKDIR /work
ENTRYPOINT ["stagebridge"]

FROM python:3.11-slim AS full
COPY pyproject.toml README.md LICENSE constraints.txt /source/
COPY bridge /source/bridge
COPY compat /source/compat
# DeepSpeed asks torch about itself while it builds, so torch has to be there first.
RUN apt-get update && apt-get install --no-install-recommends -y g++ git && rm -rf /var/lib/apt/lists/* \
    && pip install --no-cache-dir -c /source/constraints.txt setuptools "/source[engine,huggingface,plot]" \
    && DS_BUILD_OPS=0 pip install --no-cache-dir --no-build-isolation -c /source/constraints.txt deepspeed megatron-core \
    && rm -rf /source && useradd --create-home user
USER user
WORKDIR /work
ENV DS_ACCELERATOR=cpu
ENTRYPOINT ["stagebridge"]
