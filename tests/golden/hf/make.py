"""Makes the tiny models beside this file, as Hugging Face saves such models, and what their loss is.

The forward passes follow `transformers`' modeling_gpt2.py, modeling_bert.py and modeling_qwen3.py, on the tensors as
they are stored (GPT-2: packed, [in, out]). Needs numpy and safetensors; computes in float64.
"""
import json, math, os
import numpy as np
from safetensors.numpy import save_file

V, D, L, H, F, P, S, B = 37, 16, 2, 4, 24, 8, 8, 4
rng = np.random.default_rng(7)
tokens = rng.integers(1, V, (B, S + 1)).astype("int32")
save_file({"tokens": tokens}, "tokens.safetensors")
ids, labels = tokens[:, :-1], tokens[:, 1:]
erf = np.vectorize(math.erf)


def draw(*shape, dtype="float32", around=0.0):
    return (around + 0.3 * rng.standard_normal(shape)).astype(dtype)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def loss(logits):
    logp = np.log(softmax(logits))
    return -np.take_along_axis(logp, labels[..., None], -1).mean()


def layer_norm(x, w, b, eps):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps) * w + b


def rms_norm(x, w, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w


def attend(q, k, v, causal):
    """q, k, v: [B, heads, S, head_dim]."""
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        scores = np.where(np.tril(np.ones((S, S), bool)), scores, -np.inf)
    return (softmax(scores) @ v).swapaxes(1, 2).reshape(B, S, -1)


def heads(x, n):
    return x.reshape(B, S, n, -1).swapaxes(1, 2)


def gpt2():
    t = {"wte.weight": draw(V, D), "wpe.weight": draw(P, D)}
    norms = ["ln_f"] + [f"h.{i}.ln_{j}" for i in range(L) for j in (1, 2)]
    for n in norms:
        t |= {n + ".weight": draw(D, around=1.0), n + ".bias": draw(D)}
    for i in range(L):
        for n, a, b in [("attn.c_attn", D, 3 * D), ("attn.c_proj", D, D), ("mlp.c_fc", D, 4 * D), ("mlp.c_proj", 4 * D, D)]:
            t |= {f"h.{i}.{n}.weight": draw(a, b), f"h.{i}.{n}.bias": draw(b)}
        t[f"h.{i}.attn.bias"] = np.tril(np.ones((1, 1, P, P), "float32"))
    w = {k: v.astype("float64") for k, v in t.items()}
    x = w["wte.weight"][ids] + w["wpe.weight"][:S]
    for i in range(L):
        g = lambda n: w[f"h.{i}.{n}"]
        norm = lambda x, n: layer_norm(x, g(n + ".weight"), g(n + ".bias"), 1e-5)
        conv = lambda x, n: x @ g(n + ".weight") + g(n + ".bias")
        q, k, v = np.split(conv(norm(x, "ln_1"), "attn.c_attn"), 3, -1)
        x = x + conv(attend(heads(q, H), heads(k, H), heads(v, H), True), "attn.c_proj")
        h = conv(norm(x, "ln_2"), "mlp.c_fc")
        h = 0.5 * h * (1 + np.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        x = x + conv(h, "mlp.c_proj")
    x = layer_norm(x, w["ln_f.weight"], w["ln_f.bias"], 1e-5)
    config = dict(model_type="gpt2", architectures=["GPT2LMHeadModel"], n_embd=D, n_layer=L, n_head=H, n_positions=P,
                  vocab_size=V, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return config, t, loss(x @ w["wte.weight"].T)


def bert():
    # The old names of norms, as in bert-base-uncased.
    t = {}
    linear = lambda n, o, i: t.update({n + ".weight": draw(o, i), n + ".bias": draw(o)})
    norm = lambda n: t.update({n + ".LayerNorm.gamma": draw(D, around=1.0), n + ".LayerNorm.beta": draw(D)})
    e = "bert.embeddings."
    for n, rows in [("word", V), ("position", P), ("token_type", 2)]:
        t[f"{e}{n}_embeddings.weight"] = draw(rows, D)
    norm("bert.embeddings")
    for i in range(L):
        p = f"bert.encoder.layer.{i}."
        for n in ("query", "key", "value"):
            linear(f"{p}attention.self.{n}", D, D)
        linear(p + "attention.output.dense", D, D)
        norm(p + "attention.output")
        linear(p + "intermediate.dense", F, D)
        linear(p + "output.dense", D, F)
        norm(p + "output")
    linear("bert.pooler.dense", D, D)
    linear("cls.seq_relationship", 2, D)
    linear("cls.predictions.transform.dense", D, D)
    norm("cls.predictions.transform")
    t["cls.predictions.bias"] = draw(V)
    w = {k: v.astype("float64") for k, v in t.items()}
    lin = lambda x, n: x @ w[n + ".weight"].T + w[n + ".bias"]
    ln = lambda x, n: layer_norm(x, w[n + ".LayerNorm.gamma"], w[n + ".LayerNorm.beta"], 1e-12)
    gelu = lambda x: 0.5 * x * (1 + erf(x / math.sqrt(2)))
    x = w[e + "word_embeddings.weight"][ids] + w[e + "token_type_embeddings.weight"][0]
    x = ln(x + w[e + "position_embeddings.weight"][:S], "bert.embeddings")
    for i in range(L):
        p = f"bert.encoder.layer.{i}."
        q, k, v = (heads(lin(x, f"{p}attention.self.{n}"), H) for n in ("query", "key", "value"))
        x = ln(x + lin(attend(q, k, v, False), p + "attention.output.dense"), p + "attention.output")
        x = ln(x + lin(gelu(lin(x, p + "intermediate.dense")), p + "output.dense"), p + "output")
    x = ln(gelu(lin(x, "cls.predictions.transform.dense")), "cls.predictions.transform")
    logits = x @ w[e + "word_embeddings.weight"].T + w["cls.predictions.bias"]
    config = dict(model_type="bert", architectures=["BertForPreTraining"], hidden_size=D, num_hidden_layers=L,
                  num_attention_heads=H, intermediate_size=F, max_position_embeddings=P, vocab_size=V,
                  hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=0, type_vocab_size=2)
    return config, t, loss(logits)


def qwen3():
    G, E, theta, eps = 2, 8, 1e4, 1e-6
    half = "float16"
    t = {"model.embed_tokens.weight": draw(V, D, dtype=half), "model.norm.weight": draw(D, dtype=half, around=1.0)}
    for i in range(L):
        p = f"model.layers.{i}."
        for n in ("input_layernorm", "post_attention_layernorm"):
            t[f"{p}{n}.weight"] = draw(D, dtype=half, around=1.0)
        for n, o, k in [("q", H * E, D), ("k", G * E, D), ("v", G * E, D), ("o", D, H * E)]:
            t[f"{p}self_attn.{n}_proj.weight"] = draw(o, k, dtype=half)
        for n in "qk":
            t[f"{p}self_attn.{n}_norm.weight"] = draw(E, dtype=half, around=1.0)
        for n, o, k in [("gate", F, D), ("up", F, D), ("down", D, F)]:
            t[f"{p}mlp.{n}_proj.weight"] = draw(o, k, dtype=half)
    w = {k: v.astype("float64") for k, v in t.items()}
    angles = np.arange(S)[:, None] * theta ** (-np.arange(0, E, 2) / E)
    cos, sin = (np.concatenate([f(angles)] * 2, -1) for f in (np.cos, np.sin))
    rope = lambda x: x * cos + np.concatenate([-x[..., E // 2 :], x[..., : E // 2]], -1) * sin
    x = w["model.embed_tokens.weight"][ids]
    for i in range(L):
        g = lambda n: w[f"model.layers.{i}.{n}.weight"]
        h = rms_norm(x, g("input_layernorm"), eps)
        q, k, v = (heads(h @ g(f"self_attn.{n}_proj").T, m) for n, m in (("q", H), ("k", G), ("v", G)))
        q, k = (rope(rms_norm(y, g(f"self_attn.{n}_norm"), eps)) for y, n in ((q, "q"), (k, "k")))
        k, v = (np.repeat(y, H // G, 1) for y in (k, v))
        x = x + attend(q, k, v, True) @ g("self_attn.o_proj").T
        h = rms_norm(x, g("post_attention_layernorm"), eps)
        gate = h @ g("mlp.gate_proj").T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ g("mlp.up_proj").T)) @ g("mlp.down_proj").T
    x = rms_norm(x, w["model.norm.weight"], eps)
    config = dict(model_type="qwen3", architectures=["Qwen3ForCausalLM"], hidden_size=D, num_hidden_layers=L,
                  num_attention_heads=H, num_key_value_heads=G, head_dim=E, intermediate_size=F, vocab_size=V,
                  max_position_embeddings=P, rms_norm_eps=eps, rope_theta=theta, tie_word_embeddings=True)
    return config, t, loss(x @ w["model.embed_tokens.weight"].T)


losses = {}
for make in (gpt2, bert, qwen3):
    config, tensors, losses[make.__name__] = make()
    folder = "tiny-" + make.__name__
    os.makedirs(folder, exist_ok=True)
    with open(folder + "/config.json", "w") as f:
        json.dump(config, f, indent=2)
    if make is not qwen3:
        save_file(tensors, folder + "/model.safetensors", metadata={"format": "pt"})
        continue
    # In two files with an index, as large models are.
    keys, weight_map = list(tensors), {}
    for n, part in enumerate((keys[: len(keys) // 2], keys[len(keys) // 2 :])):
        name = f"model-{n + 1:05}-of-00002.safetensors"
        save_file({k: tensors[k] for k in part}, f"{folder}/{name}", metadata={"format": "pt"})
        weight_map |= {k: name for k in part}
    size = sum(v.nbytes for v in tensors.values())
    with open(folder + "/model.safetensors.index.json", "w") as f:
        json.dump({"metadata": {"total_size": size}, "weight_map": weight_map}, f, indent=2)
with open("losses.json", "w") as f:
    json.dump(losses, f, indent=2)
print(losses)
