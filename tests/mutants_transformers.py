"""Bugs in what lets transformers run on this package."""

from __future__ import annotations

from mutant import Mutant

FILE = "paged_attn/integrations/transformers.py"
HOOKS = [
    Mutant(
        "transformers_name_without_version",
        "transformers decodes through block tables where the name has flash and 2 in it",
        FILE,
        'NAME = "paged_attn_flash_2"',
        'NAME = "paged_attn_flash"',
        "test_transformers.py::test_the_name_is_one_that_decodes_through_block_tables",
    ),
    Mutant(
        "transformers_wrapped_again",
        "calling register again changes nothing",
        FILE,
        'if not hasattr(flash._lazy_imports, "paged_attn"):',
        "if flash._lazy_imports:",
        "test_transformers.py::test_calling_it_again_changes_nothing",
    ),
    Mutant(
        "transformers_all_names_are_ours",
        "other names are looked up as before",
        FILE,
        "if implementation not in (NAME, PAGED_NAME):",
        "if implementation is None:",
        "test_transformers.py::test_other_models_and_names_are_left_alone",
    ),
    Mutant(
        "transformers_class_changed",
        "only the model given is taken for compatible",
        FILE,
        "part._compatible_flash_implementations = [",
        "type(part)._compatible_flash_implementations = [",
        "test_transformers.py::test_calling_it_again_changes_nothing",
    ),
    Mutant(
        "transformers_generate_without_sinks",
        "sinks count outside continuous batching too",
        FILE,
        "        s_aux=s_aux,\n",
        "",
        "test_transformers.py::test_generate",
    ),
    Mutant(
        "transformers_unserved_model_taken",
        "a model that does not take the name is refused",
        FILE,
        "if model.config.get_text_config()._attn_implementation != NAME:",
        "if model is None:",
        "test_transformers.py::test_models_that_flash_attention_does_not_serve_are_refused",
    ),
]
