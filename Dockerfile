# The worker as an image: `make image` builds it with docker, podman or buildah, `make image-check` builds and tries it.
#
# BASE_IMAGE is a Debian or Ubuntu with Python 3.11 or newer, its venv module and its headers.
# The versions are those of constraints.txt. Which build of torch it is (CUDA is the default of pip's own index) depends on where pip
# looks; a pip.conf that says so is handed in as a secret: docker build --secret id=pip,src=pip.conf .
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS build
RUN python3 -c "import os, sys, sysconfig; \
sys.version_info >= (3, 11) or sys.exit('BASE_IMAGE: Python 3.11 or newer is needed; found ' + sys.version); \
os.path.exists(sysconfig.get_path('include') + '/Python.h') or sys.exit('BASE_IMAGE: the headers of Python are missing (libpython3-dev)'); \
import ensurepip, venv"
WORKDIR /build
ENV PIP_CONSTRAINT=/build/constraints.txt PIP_BUILD_CONSTRAINT=/build/constraints.txt \
    PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
RUN python3 -m venv tools && python3 -m venv --without-pip /app

# The dependencies before the code: a change of the code doesn't install them anew.
COPY constraints.txt pyproject.toml ./
RUN python3 -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
print(*project['dependencies'], *project['optional-dependencies']['worker'], sep='\n')" > requirements.txt
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    tools/bin/pip --python /app/bin/python install --requirement requirements.txt

# torch brings its own C++ tests, 120 MB of them; a CPU build of torch has no use for Triton, 700 MB.
RUN cd "$(/app/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
    && rm -rf torch/test torch/bin/test_* torch/bin/*Test \
    && if [ "$(/app/bin/python -c 'import torch; print(torch.version.cuda)')" = None ]; then \
        /build/tools/bin/pip --python /app/bin/python uninstall --yes triton; fi

COPY README.md LICENSE ./
COPY compiler compiler
COPY graphs graphs
COPY ops ops
COPY proto proto
COPY worker worker
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    tools/bin/pip wheel --no-deps --wheel-dir dist . \
    && tools/bin/pip --python /app/bin/python install --no-deps dist/*.whl


FROM ${BASE_IMAGE}
LABEL org.opencontainers.image.title="modelworker" \
      org.opencontainers.image.description="A gRPC model worker: executes the steps of an external scheduler on a transformer model" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0"

# Kernels are compiled at run time, so the compiler stays.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/*

# The name is for tools that look their user up; the number is what Kubernetes checks. Any other user works, too.
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /cache --shell /usr/sbin/nologin modelworker \
    && mkdir /model /cache && chmod 1777 /cache

COPY --from=build /app /app

# /cache is all that is ever written: the root file system may be read-only. HOST: all addresses, IPv4 and IPv6.
ENV PATH=/app/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONSAFEPATH=1 PYTHONDONTWRITEBYTECODE=1 \
    USER=modelworker HOME=/cache TMPDIR=/cache XDG_CACHE_HOME=/cache \
    TORCHINDUCTOR_CACHE_DIR=/cache/inductor TRITON_CACHE_DIR=/cache/triton \
    MODELWORKER_MODEL=/model MODELWORKER_HOST=[::] MODELWORKER_CACHE_DIR=/cache/modelworker
USER 10001:10001
WORKDIR /cache
VOLUME /cache
EXPOSE 50051

# For docker and compose: healthy = started and answering. Kubernetes asks the gRPC health service instead (deploy/kubernetes.yaml).
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m CMD modelworker info "127.0.0.1:${MODELWORKER_PORT:-50051}" >/dev/null

# The worker is process 1 and gets SIGTERM itself.
ENTRYPOINT ["modelworker"]
CMD ["serve"]
