# vLLM with the plugin, which lets it run without its vision tower. Build from the repository's root:
#   docker build -f deploy/docker/vllm.Dockerfile -t vision-encoder:0.2.0-vllm .
# Every command of vllm/vllm-openai works; docs/vllm.md has the arguments that name the encoder.

FROM vllm/vllm-openai:v0.33.0
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY encoder_service encoder_service
COPY lm_adapter lm_adapter
COPY proto proto
RUN pip install --no-cache-dir '.[vllm,cuda]'
WORKDIR /
