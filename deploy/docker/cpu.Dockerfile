# syntax=docker/dockerfile:1
# The service on the CPU. Build from the repository's root:
#   docker build -f deploy/docker/cpu.Dockerfile -t vision-encoder:0.2.0-cpu .
# Runs as an unprivileged user on a read-only root file system and writes to /tmp and /run/vision-encoder only:
#   docker run --read-only --tmpfs /tmp --tmpfs /run/vision-encoder:uid=65532,gid=65532,mode=0750 \
#     -v /path/to/checkpoint:/models:ro -p 50051:50051 -p 8080:8080 vision-encoder:0.2.0-cpu

FROM python:3.12.12-slim-bookworm AS packages
WORKDIR /src
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
# torch first and by itself: this layer is large and changes rarely.
RUN pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu torch==2.13.0
COPY pyproject.toml ./
# The service's requirements with traces and Mooncake, without its code: while only code changes, nodes keep this layer, which
# is nearly all of the image. Nothing is installed or compiled in the final image: pip, torch's headers and tests go.
RUN python -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
    extras = 'serve,otel,tokenspeed'.split(','); \
    print(*project['dependencies'], *sum((project['optional-dependencies'][extra] for extra in extras), []), sep='\n')" \
    > needs.txt \
    && pip install --no-cache-dir -r needs.txt \
    && echo /opt/project > /opt/venv/lib/python3.12/site-packages/project.pth \
    && rm -rf /opt/venv/lib/python3.12/site-packages/torch/include /opt/venv/lib/python3.12/site-packages/torch/test \
    && pip uninstall -y pip

# The base image's pip, for the environment's Python.
FROM packages AS project
COPY pyproject.toml README.md LICENSE ./
COPY encoder_service encoder_service
COPY lm_adapter lm_adapter
COPY proto proto
RUN /usr/local/bin/pip --python /opt/venv/bin/python install --no-cache-dir --no-deps --target /opt/project .

FROM python:3.12.12-slim-bookworm
# Mooncake loads libibverbs.
RUN apt-get update \
    && apt-get install -y --no-install-recommends libibverbs1 \
    && rm -rf /var/lib/apt/lists/* /usr/local/lib/python3.12/site-packages/pip* /usr/local/bin/pip*
COPY --from=packages /opt/venv /opt/venv
COPY --from=project /opt/project /opt/project
LABEL org.opencontainers.image.title="vision-encoder" \
    org.opencontainers.image.version="0.2.0" \
    org.opencontainers.image.licenses="Apache-2.0"
RUN install -d -o 65532 -g 65532 -m 0750 /run/vision-encoder
# glibc returns large blocks to the kernel at every free, and each new one faults in page by page; kept blocks
# make streams of rows about twice as fast. USER: packages ask for the user's name, which /etc/passwd lacks.
ENV PATH=/opt/project/bin:/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    USER=vision-encoder \
    MALLOC_MMAP_THRESHOLD_=1073741824 \
    MALLOC_TRIM_THRESHOLD_=4294967296 \
    MALLOC_TOP_PAD_=268435456 \
    VE_MODEL=/models \
    VE_DEVICE=cpu \
    VE_BROKER_PATH= \
    VE_LISTEN=0.0.0.0:50051 \
    VE_ADMIN_LISTEN=0.0.0.0:8080 \
    VE_LOG_FORMAT=json
USER 65532:65532
WORKDIR /tmp
VOLUME ["/models"]
EXPOSE 50051 8080
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=15s --timeout=10s --start-period=120s --retries=3 \
    CMD ["vision-encoder", "health", "--server", "127.0.0.1:50051"]
ENTRYPOINT ["vision-encoder", "serve"]
