"""A config class shipped with the verifier, as Kimi's is.

Nothing here needs it: transformers and vLLM bring their own for ``kimi_k25``. It is there so that
every ``AutoConfig`` on the way meets an ``auto_map``, as with the real checkpoint.
"""

from transformers import PretrainedConfig


class TinyKimiConfig(PretrainedConfig):
    """Both parts as plain dictionaries."""

    model_type = "kimi_k25"

    def __init__(self, text_config=None, vision_config=None, **kwargs):
        self.text_config, self.vision_config = text_config, vision_config
        super().__init__(**kwargs)
