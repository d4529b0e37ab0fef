"""The model classes without towers, by architecture.

LMDeploy loads this file in each process that builds a model, by its path in
``ModelConfig.custom_module_map``, which travels to Ray's actors too. The path is the same on every node.
LMDeploy appends the file's folder to ``sys.path``, so nothing else is in that.
"""

CUSTOM_MODULE_MAP = {
    architecture: f"lm_adapter.engines.lmdeploy.models.{architecture}"
    for architecture in (
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
        "KimiK25ForConditionalGeneration",
    )
}
