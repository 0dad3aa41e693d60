# SD3-Light with CUDA. The GPU driver and nvidia-container-toolkit are on the host; torch's wheel contains the CUDA libraries.
#
#   docker build -t sd3-light .
#   docker run --rm --gpus all --ipc host -v "$PWD:/work" -v ~/.cache/huggingface:/cache sd3-light check train.toml
#   docker run --rm -it --gpus all --ipc host -v "$PWD:/work" --entrypoint torchrun sd3-light \
#       --nproc_per_node 8 /opt/sd3-light/train.py --config train.toml
#
# --ipc host: data loader processes use shared memory. Files in /work belong to the user of `docker run --user`.
FROM python:3.12-slim-bookworm

# a compiler: Triton builds its launchers at the first use of a kernel; a font for Chinese captions in grids
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev fonts-noto-cjk \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/sd3-light
COPY pyproject.toml constraints.txt requirements.lock README.md LICENSE train.py ./
COPY sd3_light ./sd3_light
# on x86_64 the index has the CUDA build of torch; TORCH names another release
ARG TORCH=torch==2.13.0
# everything but torch and its CUDA libraries is verified by hash; the lock has the extras bnb and s3
RUN grep -v '^torch==' constraints.txt > /tmp/constraints.txt \
    && pip install --no-cache-dir --no-deps --require-hashes --requirement requirements.lock \
    && pip install --no-cache-dir --constraint /tmp/constraints.txt "${TORCH}" \
    && pip install --no-cache-dir --no-deps . \
    && pip check

ENV HF_HOME=/cache
WORKDIR /work
ENTRYPOINT ["sd3-light"]
CMD ["--help"]
