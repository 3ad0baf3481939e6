"""One table: what each family calls the same thing in its config.json. Loads no torch.

The keys of one line are synonyms: two of them in one file must agree. Earlier names win where a file has a reason to
carry both (an encoder-decoder's own layers come before the encoder's).
"""

LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "num_transformer_layers",
    "layers",
)
DECODER_LAYERS = ("decoder_layers", "num_decoder_layers", *LAYERS)
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "num_query_heads")
DECODER_HEADS = ("decoder_attention_heads", "num_decoder_attention_heads", *HEADS)
KV_HEADS = (
    "num_key_value_heads",
    "num_kv_heads",
    "n_kv_heads",
    "n_head_kv",
    "n_kv_head",
    "num_query_groups",
    "multi_query_group_num",
)
HIDDEN = ("hidden_size", "n_embd", "n_embed", "d_model", "model_dim", "emb_dim", "embed_dim", "dim")
HEAD_DIM = ("head_dim", "attention_head_dim", "attention_head_size", "d_kv", "dim_head", "d_head", "kv_channels")
WINDOW = ("sliding_window", "sliding_window_size", "attention_window_size", "window_size")
CHUNK = ("attention_chunk_size",)
LAYER_TYPES = ("layer_types", "layers_block_type")
POSITIONS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "seq_length",
    "model_max_length",
    "max_target_positions",
)
VOCAB = ("vocab_size", "padded_vocab_size", "n_words")
FFN = ("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim", "d_ff", "decoder_ffn_dim", "d_inner")

# recurrent layers: a Mamba's state, channels or heads, groups and convolution
SSM_STATE = ("ssm_state_size", "mamba_d_state", "state_size")
SSM_HEADS = ("mamba_num_heads", "mamba_n_heads", "n_mamba_heads", "num_heads")
SSM_HEAD_DIM = ("mamba_head_dim", "mamba_d_head", "mamba_headdim", "head_dim")
SSM_GROUPS = ("n_groups", "mamba_n_groups", "mamba_ngroups")
SSM_CONV = ("conv_kernel", "mamba_d_conv")
SSM_EXPAND = ("expand", "mamba_expand")

# where a multimodal or composite configuration keeps its language model
NESTED = ("text_config", "llm_config", "language_config", "thinker_config", "vlm_config", "language_model", "decoder")

# model types of files with their own code: the common keys say all, these names do not exist in transformers
KNOWN_ELSEWHERE = {
    "aquila", "arctic", "baichuan", "bailing_moe", "btlm", "chatglm", "codeshell", "deci", "deepseek", "deepseek_vl_v2",
    "exaone", "grok-1", "hunyuan", "internlm", "internlm2", "internvl_chat", "jais", "kimi_k2", "kimi_vl", "mimo",
    "minicpm", "minicpmv", "mixformer-sequential", "nemotron-nas", "openelm", "orion", "pangu", "phi-msft", "phi3_v",
    "plamo", "qwen", "refinedweb", "refinedwebmodel", "skywork", "solar", "stablelm_epoch", "telechat", "xverse", "yi",
}  # fmt: skip

# towers that read an image, a sound or a text once and generate nothing, as encoders of text do
ENCODERS = {
    "aimv2_text_model", "align_text_model", "altclip_text_model", "audio-spectrogram-transformer", "beit",
    "bridgetower_text_model", "chinese_clip_text_model", "clap_text_model", "clip_text_model", "clip_vision_model",
    "clipseg_text_model", "data2vec-audio", "data2vec-vision", "deit", "dinov2", "dinov3_vit", "flava_text_model",
    "groupvit_text_model", "hubert", "metaclip_2_text_model", "owlv2_text_model", "owlvit_text_model",
    "siglip2_text_model", "siglip2_vision_model", "siglip_text_model", "siglip_vision_model", "videomae", "vit",
    "vit_mae", "wav2vec2", "wav2vec2-bert", "wavlm", "xclip_text_model",
}  # fmt: skip

# every key whose class default may stand in for a missing one
READ = {
    *DECODER_LAYERS, *DECODER_HEADS, *KV_HEADS, *HIDDEN, *HEAD_DIM, *WINDOW, *CHUNK, *POSITIONS, *VOCAB, *FFN,
    *SSM_STATE, *SSM_HEADS, *SSM_HEAD_DIM, *SSM_GROUPS, *SSM_CONV, *SSM_EXPAND,
    "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "q_lora_rank", "v_head_dim", "index_head_dim",
    "use_sliding_window", "max_window_layers", "sliding_window_pattern", "local_attention", "attention_types",
    "full_attention_interval", "attn_layer_period", "attn_layer_offset", "block_types", "cross_attention_layers",
    "num_kv_shared_layers", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_head_dim",
    "linear_value_head_dim", "linear_num_heads", "linear_conv_kernel_dim", "conv_L_cache", "conv_kernel_size",
    "lru_width", "conv1d_width", "attention_hidden_size", "mamba_d_ssm", "qk_dim_factor", "v_dim_factor",
    "swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim", "global_head_dim", "num_global_key_value_heads",
    "multi_query", "new_decoder_architecture", "is_encoder_decoder", "max_source_positions", "tie_word_embeddings",
    "H_cycles", "L_cycles", "num_layers_per_stack", "n_routed_experts", "num_local_experts", "num_experts",
    "moe_intermediate_size", "loop_num_passes", "loop_layer_index_start", "loop_layer_index_end", "n_input_layers",
    "n_recurrent_layers", "n_recurrent_loops",
}  # fmt: skip
