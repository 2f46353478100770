"""Decoder-only language models, described once and loaded straight from Hugging Face folders.

`families.py` turns a config.json into `DecoderOptions`; `loader.py` fills a `Decoder` from the safetensors files, by
way of `layer_loader` (layers by kind), `module_loader` (linear layers, norms, tables) and `weight_format` (storage).
Nothing here imports transformers: it is the tests' reference, and its import alone costs seconds.
"""
