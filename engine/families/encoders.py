"""Lists the families of encoders, whose tokens attend to later ones, too, with transformers' names for their
modules.

A family of known parts is a row of ``ENCODERS``. EmbeddingGemma is a decoder of the other table that looks
ahead, and needs no row.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from truedraft.engine.checkpoints.facts import ModelFacts
from truedraft.engine.families.layer import decoder_layer
from truedraft.engine.families.linear import Make
from truedraft.engine.families.norms import make_norm
from truedraft.engine.families.table import FAMILIES
from truedraft.engine.layers.decoder import Attention, DecoderLayer
from truedraft.engine.layers.encoder import InputEmbeddings
from truedraft.engine.layers.linear import Embeddings
from truedraft.engine.layers.mlp import Activation, GatedMlp
from truedraft.engine.layers.norm import Norm
from truedraft.engine.layers.rotary import NoAngles, Rotary, rotary_kinds
from truedraft.engine.layers.run import AttentionShape
from truedraft.engine.memory.kv_cache import AttentionCache

# A function of this type computes the one score of a text from its states [tokens, hidden size].
Head = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class EncoderFamily:
    """Names modules of transformers' model, and modules inside its layers. The defaults are BERT's. Norms
    come before and after attention, before and after the MLP; a norm after a branch is applied to its sum
    with the states."""

    layers: str = "encoder.layer"
    words: str = "embeddings.word_embeddings"
    positions: str | None = "embeddings.position_embeddings"
    types: str | None = "embeddings.token_type_embeddings"
    embedding_norm: str = "embeddings.LayerNorm"
    qkv: tuple[str, ...] = ("attention.self.query", "attention.self.key", "attention.self.value")
    output: str = "attention.output.dense"
    mlp_in: tuple[str, ...] = ("intermediate.dense",)
    mlp_out: str = "output.dense"
    norms: tuple[str | None, ...] = (None, "attention.output.LayerNorm", None, "output.LayerNorm")
    last_norm: str | None = None
    rotary: str | None = None
    activation: str = "hidden_act"
    activations: dict[str, Activation] = field(default_factory=lambda: {"gelu": "lone_gelu"})
    # This returns a layer's window; None: it sees all of a text.
    window: Callable[[Any], int | None] = lambda layer: None
    # Positions begin after the padding id, which a padding token in the middle of a text has as its own.
    counts_padding: bool = False
    # This makes the scoring function of transformers' classifier from its module.
    head: Callable[[Any], Head] | None = None


def _bert_head(module: Any) -> Head:
    pooler, classifier = module.bert.pooler, module.classifier
    return lambda states: classifier(torch.tanh(pooler.dense(states[:1])))[0]


def _roberta_head(module: Any) -> Head:
    head = module.classifier
    return lambda states: head.out_proj(torch.tanh(head.dense(states[:1])))[0]


def _distilbert_head(module: Any) -> Head:
    first, classifier = module.pre_classifier, module.classifier
    return lambda states: classifier(torch.relu(first(states[:1])))[0]


def _modernbert_head(module: Any) -> Head:
    head, classifier, pooling = module.head, module.classifier, module.config.classifier_pooling
    if pooling == "cls":
        return lambda states: classifier(head(states[:1]))[0]
    return lambda states: classifier(head(states.mean(0, keepdim=True)))[0]


ROBERTA = EncoderFamily(counts_padding=True, head=_roberta_head)

ENCODERS: dict[str, EncoderFamily] = {
    "bert": EncoderFamily(head=_bert_head),
    "roberta": ROBERTA,
    "xlm-roberta": ROBERTA,
    "camembert": ROBERTA,
    "distilbert": EncoderFamily(
        layers="transformer.layer",
        types=None,
        qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        output="attention.out_lin",
        mlp_in=("ffn.lin1",),
        mlp_out="ffn.lin2",
        norms=(None, "sa_layer_norm", None, "output_layer_norm"),
        activation="activation",
        head=_distilbert_head,
    ),
    "nomic_bert": EncoderFamily(
        layers="layers",
        positions=None,
        qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        output="self_attn.o_proj",
        mlp_in=("mlp.gate_proj", "mlp.up_proj"),
        mlp_out="mlp.down_proj",
        norms=(None, "post_attention_layernorm", None, "post_mlp_layernorm"),
        rotary="rotary_emb",
        activations={"silu": "silu"},
    ),
    "modernbert": EncoderFamily(
        layers="layers",
        words="embeddings.tok_embeddings",
        positions=None,
        types=None,
        embedding_norm="embeddings.norm",
        qkv=("attn.Wqkv",),
        output="attn.Wo",
        mlp_in=("mlp.Wi",),
        mlp_out="mlp.Wo",
        norms=("attn_norm", None, "mlp_norm", None),
        last_norm="final_norm",
        rotary="rotary_emb",
        activation="hidden_activation",
        activations={"gelu": "gelu", "silu": "silu", "gelu_pytorch_tanh": "gelu_pytorch_tanh"},
        window=attrgetter("attn.sliding_window"),
        head=_modernbert_head,
    ),
}


def looks_ahead(config: Any) -> bool:
    """Tells whether a model's tokens attend to later ones."""
    return config.model_type in ENCODERS or getattr(config, "use_bidirectional_attention", None) is True


def unknown_part(config: Any) -> str | None:
    """Returns words for a part of an encoder that is not known here; None if all parts are known."""
    family = ENCODERS.get(config.model_type)
    if family is None:
        is_gemma = config.model_type == "gemma3_text" and looks_ahead(config)
        return None if is_gemma else f"{config.model_type} is no encoder of a known family"
    if (name := getattr(config, family.activation)) not in family.activations:
        return f"its activation is {name!r}, where {' or '.join(map(repr, family.activations))} is known"
    if getattr(config, "position_embedding_type", None) not in (None, "absolute", "rope"):
        return f"its positions are {config.position_embedding_type!r}, where 'absolute' is known"
    if getattr(config, "embedding_size", None) not in (None, config.hidden_size):
        return "its embeddings have another size than its layers"
    if getattr(config, "is_decoder", False):
        return "is_decoder is set"
    return None


@dataclass(frozen=True, slots=True)
class EncoderParts:
    """Holds the parts of an encoder that a pass needs."""

    embeddings: InputEmbeddings
    layers: list[DecoderLayer]
    norm: Norm | None
    rotary: Rotary


def describe_encoder(
    module: Any, facts: ModelFacts, make: Make, words_of: Callable[[Any], Embeddings]
) -> EncoderParts:
    """Describes transformers' loaded base model ``module``."""
    config, like = module.config, torch.empty(0, dtype=facts.dtype, device=facts.device)
    if config.model_type not in ENCODERS:
        return _describe_decoder(module, facts, make, words_of)
    family = ENCODERS[config.model_type]
    rotary = NoAngles() if family.rotary is None else getattr(module, family.rotary)
    positions = None if family.positions is None else attrgetter(family.positions)(module).weight.detach()
    types = None if family.types is None else attrgetter(family.types)(module).weight.detach()
    embeddings = InputEmbeddings(
        words=words_of(attrgetter(family.words)(module)),
        positions=positions,
        types=types,
        norm=_norm(attrgetter(family.embedding_norm)(module)),
        padding=int(config.pad_token_id) if family.counts_padding else None,
    )
    layers = [
        _layer(family, layer, index, facts, make)
        for index, layer in enumerate(attrgetter(family.layers)(module))
    ]
    last = None if family.last_norm is None else _norm(getattr(module, family.last_norm))
    return EncoderParts(embeddings, layers, last, Rotary(rotary, config, like))


def _layer(family: EncoderFamily, layer: Any, index: int, facts: ModelFacts, make: Make) -> DecoderLayer:
    config = facts.config
    heads = int(config.num_attention_heads)
    size = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    kinds = rotary_kinds(config)
    of_kind = 0 if kinds == [None] else kinds.index(config.layer_types[index])
    norms = [None if name is None else _norm(attrgetter(name)(layer)) for name in family.norms]
    stored = heads, size
    return DecoderLayer(
        mixer=Attention(
            shape=AttentionShape(
                layer=index,
                num_heads=heads,
                num_kv_heads=heads,
                head_size=size,
                scaling=size**-0.5,
                sliding_window=family.window(layer),
                norm=None,
                rotary=None if family.rotary is None else of_kind,
                looks_ahead=True,
            ),
            qkv=make([attrgetter(name)(layer) for name in family.qkv], 1.0),
            output=make([attrgetter(family.output)(layer)], 1.0),
            cache=AttentionCache(stored, stored, facts.dtype, facts.device),
        ),
        mlp=GatedMlp(
            activation=family.activations[getattr(config, family.activation)],
            gate_up=make([attrgetter(name)(layer) for name in family.mlp_in], 1.0),
            down=make([attrgetter(family.mlp_out)(layer)], 1.0),
        ),
        mixer_norm=norms[0],
        mixer_post_norm=norms[1],
        mlp_norm=norms[2],
        mlp_post_norm=norms[3],
        norms_sums=True,
    )


def _norm(module: Any) -> Norm | None:
    """Makes our norm of transformers' LayerNorm."""
    if type(module) is nn.Identity:
        return None
    weight = module.weight.detach().float()
    bias = torch.zeros_like(weight) if module.bias is None else module.bias.detach().float()
    return Norm(weight, module.eps, centres=True, bias=bias)


def _describe_decoder(
    module: Any, facts: ModelFacts, make: Make, words_of: Callable[[Any], Embeddings]
) -> EncoderParts:
    """Describes a decoder of the table whose tokens look ahead."""
    layers = []
    for index, layer in enumerate(module.layers):
        described = decoder_layer(layer, index, facts, make)
        assert isinstance(described.mixer, Attention)
        ahead = replace(described.mixer.shape, looks_ahead=True)
        layers.append(replace(described, mixer=replace(described.mixer, shape=ahead)))
    table = module.embed_tokens
    scale = torch.tensor(float(table.scalar_embed_scale)).to(facts.dtype).item()
    return EncoderParts(
        InputEmbeddings(words_of(table), scale=scale),
        layers,
        make_norm(FAMILIES[module.config.model_type].norms, module.norm),
        Rotary(module.rotary_emb, module.config, torch.empty(0, dtype=facts.dtype, device=facts.device)),
    )
