"""Inference with transformers: encoders, decoders, caches, `generate`."""

from __future__ import annotations

import inspect
import tempfile
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache, masking_utils

import onelaunch as ol
from tests.device.architectures import ARCHITECTURES, causal

from .harness import Run, inference

transformers.logging.set_verbosity_error()

TEXT = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
DECODER = {**TEXT, "num_key_value_heads": 2}
GPT2 = {
    "vocab_size": 99,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": None,
}
GENERATED = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}


def made(run: Run, kind: str, head: str, **config: Any) -> Any:
    """A small model of random weights."""
    torch.manual_seed(0)
    model = getattr(transformers, head)(getattr(transformers, f"{kind}Config")(**config))
    return model.eval().to(run.device)


def architecture(run: Run, name: str) -> tuple[Any, Any]:
    """A model of `tests/device/architectures.py`, and what gives its arguments."""
    (found,) = (a for a in ARCHITECTURES if a.name == name)
    return found.build(run.device), lambda i: found.arguments(i, run.device)


def ids(run: Run, seed: int, batch: int = 2, length: int = 10) -> Tensor:
    return run.ints(seed, 99, batch, length, low=3)


def padded(run: Run, lengths: tuple[int, ...]) -> Tensor:
    longest = max(lengths)
    rows = [[1] * n + [0] * (longest - n) for n in lengths]
    return torch.tensor(rows, device=run.device)


@inference()
def bert_sentence_embeddings_without_a_mask(run: Run) -> None:
    fast = run.graph(made(run, "Bert", "BertModel", **TEXT))
    with torch.no_grad():
        for i in range(7):
            hidden = fast(input_ids=ids(run, i)).last_hidden_state
            run.see(F.normalize(hidden.mean(1), dim=-1))


@inference()
def bert_with_a_padding_mask(run: Run) -> None:
    """On the host transformers asks the mask whether it masks anything."""
    fast = run.graph(made(run, "Bert", "BertModel", **TEXT))
    with torch.no_grad():
        for i in range(7):
            mask = padded(run, (10, 6 + i % 3))
            run.see(fast(input_ids=ids(run, i), attention_mask=mask))


@inference()
def bert_with_a_padding_mask_and_eager_attention(run: Run) -> None:
    fast = run.graph(made(run, "Bert", "BertModel", **TEXT, attn_implementation="eager"))
    with torch.no_grad():
        for i in range(7):
            mask = padded(run, (10, 6 + i % 3))
            run.see(fast(input_ids=ids(run, i), attention_mask=mask))


@inference()
def bert_with_a_mask_of_four_dimensions(run: Run) -> None:
    fast = run.graph(made(run, "Bert", "BertModel", **TEXT))
    with torch.no_grad():
        for i in range(7):
            mask = padded(run, (10, 6 + i % 3))[:, None, None, :] > 0
            run.see(fast(input_ids=ids(run, i), attention_mask=mask.expand(2, 1, 10, 10)))


@inference()
def roberta_for_classification(run: Run) -> None:
    config = {**TEXT, "num_labels": 4, "type_vocab_size": 1, "attn_implementation": "eager"}
    fast = run.graph(made(run, "Roberta", "RobertaForSequenceClassification", **config))
    with torch.inference_mode():
        for i in range(7):
            mask = padded(run, (10, 6 + i % 3))
            run.see(fast(ids(run, i), attention_mask=mask).logits.softmax(-1))


@inference()
def distilbert_for_question_answering(run: Run) -> None:
    config = {"vocab_size": 99, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}
    fast = run.graph(made(run, "DistilBert", "DistilBertForQuestionAnswering", **config))
    with torch.inference_mode():
        for i in range(7):
            out = fast(input_ids=ids(run, i))
            run.see(out, out.start_logits.argmax(-1), out.end_logits.argmax(-1))


@inference(warns=("OL308",))
def electra_for_token_classification_with_hidden_states(run: Run) -> None:
    model = made(run, "Electra", "ElectraForTokenClassification", **TEXT, embedding_size=16)
    fast = run.graph(model)
    with torch.no_grad():
        for i in range(7):
            run.see(fast(input_ids=ids(run, i), output_hidden_states=True))


@inference()
def a_tuple_in_place_of_a_model_output(run: Run) -> None:
    fast = run.graph(made(run, "Bert", "BertModel", **TEXT))
    with torch.no_grad():
        for i in range(7):
            run.see(fast(input_ids=ids(run, i), return_dict=False))


@inference(recordings=2)
def bert_of_two_lengths(run: Run) -> None:
    fast = run.graph(made(run, "Bert", "BertModel", **TEXT))
    with torch.no_grad():
        for i in range(12):
            run.see(fast(input_ids=ids(run, i, length=(8, 12)[i % 2])).pooler_output)


@inference()
def gpt2_scores_of_sentences(run: Run) -> None:
    fast = run.graph(made(run, "GPT2", "GPT2LMHeadModel", **GPT2))
    with torch.no_grad():
        for i in range(7):
            tokens = ids(run, i)
            logits = fast(tokens, attention_mask=causal(2, 10).to(run.device)).logits
            chosen = F.log_softmax(logits[:, :-1], -1).gather(-1, tokens[:, 1:, None])
            run.see(chosen.sum(1))


def _generated(run: Run, model: Any, calls: int = 2, **options: Any) -> None:
    """`generate` of a model whose forward is graphed."""
    fast = run.graph(model)
    with torch.no_grad():
        for i in range(calls):
            tokens = ids(run, i, 1, 6)
            mask = torch.ones_like(tokens)
            run.see(fast.generate(tokens, attention_mask=mask, **{**GENERATED, **options}))


@inference(replays=0, recordings=8)
def gpt2_generates_with_a_growing_cache(run: Run) -> None:
    """Each step has a size of its own; later texts replay the sizes of the first."""
    _generated(run, made(run, "GPT2", "GPT2LMHeadModel", **GPT2), calls=6, max_new_tokens=4)


@inference(recordings=8)
def gpt2_generates_without_a_cache(run: Run) -> None:
    model = made(run, "GPT2", "GPT2LMHeadModel", **GPT2)
    _generated(run, model, calls=6, max_new_tokens=4, use_cache=False)


@inference(replays=20, recordings=1)
def llama_generates_with_a_static_cache(run: Run) -> None:
    model = made(run, "Llama", "LlamaForCausalLM", **DECODER)
    _generated(
        run, model, calls=3, cache_implementation="static", max_new_tokens=16, disable_compile=True
    )


@inference(replays=10, recordings=4)
def llama_samples_with_a_static_cache(run: Run) -> None:
    model = made(run, "Llama", "LlamaForCausalLM", **DECODER)
    options = {"do_sample": True, "top_k": 10, "temperature": 0.7}
    _generated(run, model, cache_implementation="static", disable_compile=True, **options)


def _decoded(run: Run, model: Any, steps: int = 18, length: int = 32) -> None:
    """Greedy decoding over a StaticCache that the caller holds and passes at each step."""
    fast = run.graph(model)
    cache = StaticCache(config=model.config, max_cache_len=length)
    tokens = ids(run, 0, 1, 4)
    with torch.no_grad():
        out = fast(tokens, past_key_values=cache, use_cache=True)
        for _ in range(steps):
            token = out.logits[:, -1:].argmax(-1)
            out = fast(token, past_key_values=cache, use_cache=True)
            run.see(token, out.logits)
    run.see(cache)


@inference()
def llama_decodes_with_a_static_cache(run: Run) -> None:
    _decoded(run, made(run, "Llama", "LlamaForCausalLM", **DECODER))


@inference(recordings=32)
def mistral_decodes_past_its_sliding_window(run: Run) -> None:
    """`cumulative_length_int` of the cache moves on in Python at each step."""
    _decoded(run, made(run, "Mistral", "MistralForCausalLM", **DECODER, sliding_window=8))


@inference(recordings=32)
def gemma2_decodes_past_its_sliding_window(run: Run) -> None:
    config = {**DECODER, "head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8}
    _decoded(run, made(run, "Gemma2", "Gemma2ForCausalLM", **config))


@inference(recordings=32)
def qwen3_decodes_with_a_static_cache(run: Run) -> None:
    _decoded(run, made(run, "Qwen3", "Qwen3ForCausalLM", **DECODER, head_dim=8))


WINDOWED = {**DECODER, "head_dim": 8, "sliding_window": 8}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}


def _served(run: Run, kind: str, head: str, **config: Any) -> None:
    """Four requests to a decoder with a sliding window, each with a cache of its own."""
    model = made(run, kind, head, **WINDOWED, **config)
    _generated(
        run, model, calls=4, cache_implementation="static", max_new_tokens=16, disable_compile=True
    )


@inference(replays=40, recordings=3)
def mistral_serves_requests_past_its_window(run: Run) -> None:
    _served(run, "Mistral", "MistralForCausalLM")


@inference(replays=40, recordings=3)
def gemma2_serves_requests_past_its_window(run: Run) -> None:
    _served(run, "Gemma2", "Gemma2ForCausalLM", query_pre_attn_scalar=8)


@inference(replays=40, recordings=3)
def gemma3_serves_requests_past_its_window(run: Run) -> None:
    _served(run, "Gemma3Text", "Gemma3ForCausalLM", query_pre_attn_scalar=8, **LAYERS)


@inference(replays=40, recordings=3)
def gpt_oss_serves_requests_past_its_window(run: Run) -> None:
    _served(run, "GptOss", "GptOssForCausalLM", experts_implementation="batched_mm", **EXPERTS)


@inference(replays=40, recordings=3)
def cohere2_serves_requests_past_its_window(run: Run) -> None:
    _served(run, "Cohere2", "Cohere2ForCausalLM", **LAYERS)


# transformers 5.17 fails here in eager: it gives the function of chunks an argument of the others.
_CHUNKS = inspect.signature(masking_utils.create_chunked_causal_mask).parameters
_ON = ("cpu", "cuda") if "block_sequence_ids" in _CHUNKS else ()


@inference(replays=40, recordings=3, on=_ON)
def llama4_serves_requests_past_its_chunk(run: Run) -> None:
    sizes = {"attention_chunk_size": 8, "intermediate_size_mlp": 48}
    _served(run, "Llama4Text", "Llama4ForCausalLM", **sizes, **EXPERTS)


@inference(replays=0, recordings=10)
def llama_decodes_with_a_dynamic_cache(run: Run) -> None:
    """The cache grows at each step; later texts replay the sizes of the first."""
    model = made(run, "Llama", "LlamaForCausalLM", **DECODER)
    fast = run.graph(model)
    with torch.no_grad():
        for i in range(6):
            cache = DynamicCache(config=model.config)
            out = fast(ids(run, i, 1, 4), past_key_values=cache, use_cache=True)
            for _ in range(3):
                token = out.logits[:, -1:].argmax(-1)
                out = fast(token, past_key_values=out.past_key_values, use_cache=True)
                run.see(token)
            run.see(out.past_key_values.get_seq_length())


@inference()
def a_prefilled_cache_is_read_only(run: Run) -> None:
    """Scores of several continuations of one prefix, whose keys and values are arguments."""
    model = made(run, "Llama", "LlamaForCausalLM", **DECODER)
    with torch.no_grad():
        prefix = model(ids(run, 0, 1, 4), use_cache=True).past_key_values
        layers = [(layer.keys, layer.values) for layer in prefix.layers]

        @run.graph
        def scores(tokens: Tensor, layers: list[tuple[Tensor, Tensor]]) -> Tensor:
            cache = DynamicCache(config=model.config)
            for k, (keys, values) in enumerate(layers):
                cache.update(keys, values, k)
            return model(tokens, past_key_values=cache, use_cache=True).logits

        for i in range(7):
            run.see(scores(ids(run, i, 1, 3), layers))


@inference()
def t5_encodes_once_and_decodes(run: Run) -> None:
    model, _ = architecture(run, "t5")
    encode, decode = run.graph(model.encoder), run.graph(model)
    with torch.no_grad():
        for i in range(6):
            hidden = encode(input_ids=ids(run, i)).last_hidden_state
            so_far = ids(run, i + 20, 2, 5)
            out = decode(encoder_outputs=(hidden,), decoder_input_ids=so_far, use_cache=False)
            run.see(out.logits)


@inference()
def bart_with_its_masks(run: Run) -> None:
    model, arguments = architecture(run, "bart")
    fast = run.graph(model)
    with torch.no_grad():
        for i in range(7):
            run.see(fast(**arguments(i)).last_hidden_state)


@inference(recordings=5)
def t5_generates_without_a_cache(run: Run) -> None:
    model, _ = architecture(run, "t5")
    model.generation_config.decoder_start_token_id = 0
    fast = run.graph(model)
    with torch.no_grad():
        for i in range(5):
            mask = torch.ones(2, 10, dtype=torch.int64, device=run.device)
            options = {"max_new_tokens": 5, "use_cache": False, "pad_token_id": 0}
            run.see(fast.generate(ids(run, i), attention_mask=mask, do_sample=False, **options))


def _architecture(name: str, **options: Any) -> None:
    def body(run: Run) -> None:
        model, arguments = architecture(run, name)
        fast = run.graph(model)
        with torch.inference_mode():
            for i in range(6):
                out = fast(**arguments(i))
                run.see({k: v for k, v in out.items() if isinstance(v, Tensor)})

    body.__name__ = f"{name.replace('-', '_').replace(' ', '_')}_in_inference_mode"
    inference(**options)(body)


for _name in (
    "vit",
    "dinov2",
    "swin",
    "convnext",
    "wav2vec2",
    "whisper",
    "clip",
    "siglip",
    "mamba",
):
    _architecture(_name)


@inference()
def clip_scores_images_against_cached_texts(run: Run) -> None:
    model, arguments = architecture(run, "clip")
    look = run.graph(model.vision_model)
    with torch.no_grad():
        texts = run.rand(0, 5, 32)
        for i in range(7):
            image = look(pixel_values=arguments(i)["pixel_values"]).pooler_output
            run.see((F.normalize(image, dim=-1) @ F.normalize(texts, dim=-1).T).softmax(-1))


@inference()
def a_retriever_and_a_reranker(run: Run) -> None:
    model = made(run, "Bert", "BertModel", **TEXT)
    heads = nn.Linear(64, 1).to(run.device)

    @run.graph
    def rank(query: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
        a = model(input_ids=query).pooler_output
        b = model(input_ids=documents).pooler_output
        scores = heads(torch.cat([a.expand_as(b), b], -1)).squeeze(-1)
        best, places = scores.topk(2)
        return best, places

    with torch.no_grad():
        for i in range(7):
            run.see(rank(ids(run, i, 1), ids(run, i + 20, 4)))


@inference(recordings=2)
def a_model_with_a_classifier_replaced(run: Run) -> None:
    model = made(run, "Bert", "BertForSequenceClassification", **TEXT, num_labels=2)
    fast = run.graph(model)
    with torch.no_grad():
        for i in range(12):
            if i == 6:
                model.classifier = nn.Linear(32, 5).to(run.device)
            run.see(fast(input_ids=ids(run, i)).logits)


@inference()
def speculative_decoding_by_hand(run: Run) -> None:
    """A small model proposes three tokens, and the large one accepts as many as it agrees with."""
    large = run.graph(made(run, "GPT2", "GPT2LMHeadModel", **{**GPT2, "use_cache": False}))
    small = made(run, "GPT2", "GPT2LMHeadModel", **{**GPT2, "n_layer": 1, "use_cache": False})
    small = run.graph(small)
    window = torch.zeros(1, 32, dtype=torch.int64, device=run.device)
    window[0, :4] = ids(run, 0, 1, 4)
    mask = causal(1, 32).to(run.device)
    at = 4
    with torch.no_grad():
        while at < 24:
            draft = window.clone()
            for k in range(3):
                logits = small(draft, attention_mask=mask).logits
                draft[0, at + k] = logits[0, at + k - 1].argmax()
            wanted = large(draft, attention_mask=mask).logits[0].argmax(-1)
            agreed = 0
            while agreed < 3 and draft[0, at + agreed] == wanted[at + agreed - 1]:
                agreed += 1
            window[0, at : at + agreed] = draft[0, at : at + agreed]
            window[0, at + agreed] = wanted[at + agreed - 1]
            at += agreed + 1
            run.see(window)


@inference(replays=10, recordings=2, exact=False)
def sentences_of_all_lengths(run: Run) -> None:
    """As `encode` of sentence-transformers: sorted by length, batched, pooled by their masks."""
    model = made(run, "Bert", "BertModel", **TEXT).requires_grad_(False)
    sentences = [[5 + (7 * i + k) % 90 for k in range(3 + 5 * i % 26)] for i in range(64)]
    longest_first = sorted(range(64), key=lambda i: -len(sentences[i]))

    @run.graph(buckets=ol.Buckets(dim=1, sizes=(16, 32), pad={"mask": 0}))
    def embed(ids: Tensor, mask: Tensor) -> Tensor:
        seen = mask[:, None, None, :] > 0
        hidden = model(input_ids=ids, attention_mask=seen).last_hidden_state
        kept = mask[..., None].to(hidden.dtype)
        return F.normalize((hidden * kept).sum(1) / kept.sum(1), dim=-1)

    found = torch.zeros(64, 32, device=run.device)
    with torch.inference_mode():
        for start in range(0, 64, 4):
            rows = longest_first[start : start + 4]
            lengths = tuple(len(sentences[i]) for i in rows)
            texts = [sentences[i] + [0] * (max(lengths) - len(sentences[i])) for i in rows]
            ids = torch.tensor(texts, device=run.device)
            found[rows] = embed(ids, padded(run, lengths))
    run.see(found, found @ found.T)


@inference()
def saved_and_made_again_by_the_name_of_its_class(run: Run) -> None:
    """`save_pretrained` writes the name of the model's class, by which it is found again."""
    fast = run.graph(made(run, "GPT2", "GPT2LMHeadModel", **GPT2))
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        for i in range(8):
            run.see(fast(ids(run, i), use_cache=False).logits)
        fast.save_pretrained(folder)
        config = transformers.AutoConfig.from_pretrained(folder)
        again = getattr(transformers, config.architectures[0]).from_pretrained(folder)
        run.see(config.architectures, again.eval().to(run.device)(ids(run, 9)).logits)
