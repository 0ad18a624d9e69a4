"""Small models of many architectures, built from configurations of transformers: nothing is downloaded, and the weights
are random. `ARCHITECTURES[name]()` gives a model in training mode and the arguments of its forward, which returns a
loss.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

Inputs = dict[str, Any]
VOCABULARY = 100
TEXT = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
    "vocab_size": VOCABULARY,
}  # fmt: skip
VISION = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
GROUPED = {**TEXT, "num_key_value_heads": 2}
SEQUENCES = {
    "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "d_model": 64, "vocab_size": VOCABULARY, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "forced_eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip


def tokens(batch: int = 4, length: int = 32) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, length))


def language() -> Inputs:
    ids = tokens()
    return {"input_ids": ids, "labels": ids.clone()}


def pictures(size: int) -> Inputs:
    return {"pixel_values": torch.randn(4, 3, size, size), "labels": torch.tensor([0, 1, 1, 0])}


def sound() -> Inputs:
    return {"input_values": torch.randn(4, 800), "labels": torch.randint(1, 32, (4, 8))}


def spectra() -> Inputs:
    return {"input_features": torch.randn(4, 80, 100), "labels": tokens(length=16)}


def captions() -> Inputs:
    return {"input_ids": tokens(length=16), "pixel_values": torch.randn(4, 3, 32, 32), "return_loss": True}


def made(config: str, model: str, inputs: Callable[[], Inputs], **options: Any) -> tuple[nn.Module, Inputs]:
    torch.manual_seed(0)
    module = getattr(transformers, model)(getattr(transformers, config)(**options))
    module.train()
    return module, inputs()


ARCHITECTURES: dict[str, Callable[[], tuple[nn.Module, Inputs]]] = {
    name: functools.partial(made, config, model, inputs, **options)
    for name, config, model, inputs, options in [
        ("BERT", "BertConfig", "BertForMaskedLM", language, TEXT),
        ("RoBERTa", "RobertaConfig", "RobertaForMaskedLM", language, {**TEXT, "max_position_embeddings": 64}),
        ("ALBERT", "AlbertConfig", "AlbertForMaskedLM", language, {**TEXT, "embedding_size": 32}),
        ("ELECTRA", "ElectraConfig", "ElectraForMaskedLM", language, {**TEXT, "embedding_size": 32}),
        ("DeBERTa-v2", "DebertaV2Config", "DebertaV2ForMaskedLM", language,
         {**TEXT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 8}),
        ("Longformer", "LongformerConfig", "LongformerForMaskedLM", language,
         {**TEXT, "attention_window": 8, "max_position_embeddings": 66}),
        ("Funnel", "FunnelConfig", "FunnelForMaskedLM", language,
         {"vocab_size": VOCABULARY, "block_sizes": [1, 1], "d_model": 64, "n_head": 4, "d_head": 16, "d_inner": 128}),
        ("XLNet", "XLNetConfig", "XLNetLMHeadModel", language,
         {"vocab_size": VOCABULARY, "d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 128}),
        ("GPT-2", "GPT2Config", "GPT2LMHeadModel", language,
         {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2}),
        ("GPT-NeoX", "GPTNeoXConfig", "GPTNeoXForCausalLM", language, TEXT),
        ("OPT", "OPTConfig", "OPTForCausalLM", language,
         {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 128,
          "vocab_size": VOCABULARY, "word_embed_proj_dim": 64}),
        ("BLOOM", "BloomConfig", "BloomForCausalLM", language,
         {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, "hidden_dropout": 0.1}),
        ("Llama", "LlamaConfig", "LlamaForCausalLM", language, GROUPED),
        ("Mistral", "MistralConfig", "MistralForCausalLM", language, {**GROUPED, "sliding_window": 16}),
        ("Mixtral", "MixtralConfig", "MixtralForCausalLM", language,
         {**GROUPED, "num_local_experts": 4, "output_router_logits": True}),
        ("Qwen2", "Qwen2Config", "Qwen2ForCausalLM", language, GROUPED),
        ("Gemma 2", "Gemma2Config", "Gemma2ForCausalLM", language, {**GROUPED, "head_dim": 16}),
        ("Phi-3", "Phi3Config", "Phi3ForCausalLM", language, {**GROUPED, "pad_token_id": 0}),
        ("Falcon", "FalconConfig", "FalconForCausalLM", language,
         {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCABULARY}),
        ("Mamba", "MambaConfig", "MambaForCausalLM", language,
         {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": VOCABULARY, "state_size": 8}),
        ("RWKV", "RwkvConfig", "RwkvForCausalLM", language,
         {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2}),
        ("T5", "T5Config", "T5ForConditionalGeneration", language,
         {"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4, "d_kv": 16, "vocab_size": VOCABULARY,
          "decoder_start_token_id": 0}),
        ("BART", "BartConfig", "BartForConditionalGeneration", language, SEQUENCES),
        ("Whisper", "WhisperConfig", "WhisperForConditionalGeneration", spectra,
         {**SEQUENCES, "max_source_positions": 50, "suppress_tokens": None, "begin_suppress_tokens": None}),
        ("wav2vec 2.0", "Wav2Vec2Config", "Wav2Vec2ForCTC", sound,
         {**TEXT, "vocab_size": 32, "conv_dim": (32, 32), "conv_stride": (5, 2), "conv_kernel": (10, 3),
          "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
          "mask_time_prob": 0.0, "layerdrop": 0.0}),
        ("CLIP", "CLIPConfig", "CLIPModel", captions,
         {"text_config": {**TEXT, "bos_token_id": 1, "eos_token_id": 2},
          "vision_config": {**VISION, "image_size": 32, "patch_size": 8}, "projection_dim": 32}),
        ("ViT", "ViTConfig", "ViTForImageClassification", lambda: pictures(32),
         {**VISION, "image_size": 32, "patch_size": 8, "hidden_dropout_prob": 0.1}),
        ("DINOv2", "Dinov2Config", "Dinov2ForImageClassification", lambda: pictures(28),
         {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 28, "patch_size": 7,
          "drop_path_rate": 0.1}),
        ("Swin", "SwinConfig", "SwinForImageClassification", lambda: pictures(32),
         {"image_size": 32, "patch_size": 2, "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4],
          "window_size": 4}),
        ("SegFormer", "SegformerConfig", "SegformerForImageClassification", lambda: pictures(64),
         {"hidden_sizes": [16, 32, 32, 64], "depths": [1, 1, 1, 1]}),
        ("ConvNeXt", "ConvNextConfig", "ConvNextForImageClassification", lambda: pictures(64),
         {"hidden_sizes": [16, 32, 64, 64], "depths": [1, 1, 2, 1], "drop_path_rate": 0.1}),
        ("ResNet", "ResNetConfig", "ResNetForImageClassification", lambda: pictures(64),
         {"embedding_size": 16, "hidden_sizes": [16, 32, 64, 64], "depths": [1, 1, 1, 1], "layer_type": "basic"}),
        ("MobileNetV2", "MobileNetV2Config", "MobileNetV2ForImageClassification", lambda: pictures(64),
         {"depth_multiplier": 0.25, "image_size": 64}),
    ]
}  # fmt: skip


Gradients = dict[str, torch.Tensor]


def loss_and_gradients(model: nn.Module, inputs: Inputs, region: Any) -> tuple[torch.Tensor, Gradients, Any]:
    """A training step's results under the same random state each time, its forward inside `region`, and what entering
    that gave."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    with region as entered:
        loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, entered


def gradient_error(found: Gradients, exact: Gradients) -> float:
    difference = sum((found[name].double() - exact[name].double()).square().sum() for name in exact)
    return float((difference / sum(grad.double().square().sum() for grad in exact.values())).sqrt())
