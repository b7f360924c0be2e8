# One image for everything here: a job, an endpoint, and the pods of deploy/.
#   docker build -t registry.example.com/skipdecode-ray:1.0.0 .
#   docker push registry.example.com/skipdecode-ray:1.0.0
#   docker run --rm --shm-size=2g registry.example.com/skipdecode-ray:1.0.0 demo
#   docker run --rm --shm-size=2g -p 8000:8000 -e SKIPDECODE_API_KEYS=KEY registry.example.com/skipdecode-ray:1.0.0 \
#       serve --config configs/serve.yaml --host 0.0.0.0
# torch is what the package index has for this platform: on x86 that is CUDA's. For machines without GPUs, name an index
# that has the build for CPUs: --build-arg PIP_EXTRA_INDEX_URL=... A test runs these steps without Docker.
FROM python:3.12-slim

# bash and wget: KubeRay's entry points and probes; g++: the CPU kernels are compiled where they run
RUN apt-get update && apt-get install --yes --no-install-recommends bash g++ wget && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 1000 ray

ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /app

# the dependencies first: this layer stays as long as pyproject.toml does
COPY pyproject.toml /app/
RUN python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" > requirements.txt && pip install -r requirements.txt && rm requirements.txt

COPY . /app/
RUN pip install --no-deps --editable .
RUN mkdir -p outputs
RUN chown ray outputs

ENV PYTHONPATH=/app PYTHONUNBUFFERED=1 RAY_USAGE_STATS_ENABLED=0
USER 1000
EXPOSE 8000
ENTRYPOINT ["skipdecode"]
CMD ["--help"]
