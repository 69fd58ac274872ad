//! A Hugging Face `config.json` as the text of a `model.ron`.
//!
//! Every field of the config is either read, or in a list of fields that change nothing of what is
//! computed, or refused: a field that is ignored trains another model than the one published. What
//! the config does not say (batch, schedule, precision) is chosen, and marked as chosen in the text.
//!
//! Meaning and defaults of the fields are those of `transformers`' configuration classes.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use serde_json::{Map, Value};

/// What a config leaves open.
#[derive(Debug, Clone, Copy)]
pub struct Choices<'a> {
    /// The model's name; by default that of the config's `_name_or_path`, or its type.
    pub name: Option<&'a str>,
    /// Sequences of one step, over all ranks.
    pub batch: u64,
    /// Tokens of a sequence; by default as many as the model takes, up to 4096.
    pub sequence: Option<u64>,
}

/// A config as a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Imported {
    /// The text of `model.ron`.
    pub text: String,
    /// Where the model differs from what `transformers` would train; also comments in the text.
    pub notes: Vec<String>,
}

/// Why a config does not become a model.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// It is no JSON object.
    #[error("this is no config: {0}")]
    NotJson(String),
    /// A field is missing, or of the wrong type.
    #[error("`{field}` is {found} and must be {expected}")]
    Field {
        /// The field, dotted where it is inside another.
        field: String,
        /// What is there.
        found: String,
        /// What would be right.
        expected: &'static str,
    },
    /// A kind of model that is not known.
    #[error("`model_type` is {0}; planc reads {KNOWN_TYPES}")]
    ModelType(String),
    /// A field asks for something that planc does not have.
    #[error("`{field}` is {found}, and planc has no {missing}")]
    Unsupported {
        /// The field.
        field: String,
        /// Its value.
        found: String,
        /// What is missing, and perhaps how to do without.
        missing: String,
    },
    /// Fields that nobody here knows.
    #[error("unknown {}, which might change what the model computes", fields(.0))]
    Unknown(Vec<String>),
}

impl ConfigError {
    /// The code of the error.
    pub fn code(&self) -> &'static str {
        match self {
            ConfigError::NotJson(_) | ConfigError::Field { .. } => "PL0780",
            ConfigError::ModelType(_) => "PL0781",
            ConfigError::Unsupported { .. } => "PL0782",
            ConfigError::Unknown(_) => "PL0783",
        }
    }
}

fn fields(names: &[String]) -> String {
    let names: Vec<String> = names.iter().map(|it| format!("`{it}`")).collect();
    format!("field{} {}", if names.len() == 1 { "" } else { "s" }, names.join(", "))
}

const KNOWN_TYPES: &str = "llama, mistral, qwen2, qwen3, gpt2, bert";

/// Sequences are cut to this, unless asked for: memory of activations grows with them.
const SEQUENCE: u64 = 4096;

/// Fields that change nothing of what is trained: names, how text is generated, what is returned,
/// heads of other tasks, how the same is computed.
const HARMLESS: &[&str] = &[
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_name_or_path",
    "attn_implementation",
    "bad_words_ids",
    "begin_suppress_tokens",
    "bos_token_id",
    "chunk_size_feed_forward",
    "classifier_dropout",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "dtype",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "eos_token_id",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "gradient_checkpointing",
    "id2label",
    "label2id",
    "length_penalty",
    "max_length",
    "min_length",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_labels",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "prefix",
    // Splits GEMMs of Llama, which adds up the same products.
    "pretraining_tp",
    "problem_type",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict",
    "return_dict_in_generate",
    "sep_token_id",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "torchscript",
    "transformers_version",
    "typical_p",
    "use_bfloat16",
    "use_cache",
];

/// The text of a `model.ron` for a `config.json`.
///
/// # Errors
/// [`ConfigError`], for a config that cannot be read or says something that has no counterpart.
pub fn model_ron(config: &str, choices: &Choices<'_>) -> Result<Imported, ConfigError> {
    let value: Value =
        serde_json::from_str(config).map_err(|it| ConfigError::NotJson(it.to_string()))?;
    let Value::Object(object) = &value else {
        return Err(ConfigError::NotJson("it is JSON, but no object".into()));
    };
    let mut config = Config { object, path: "", used: BTreeSet::new() };
    let kind = config.required("model_type", "a word")?;
    let text = kind.as_str().unwrap_or_default();
    base(&mut config)?;
    let imported = match text {
        "llama" | "mistral" | "qwen2" | "qwen3" => llama(&mut config, text, choices)?,
        "gpt2" => gpt2(&mut config, choices)?,
        "bert" => bert(&mut config, choices)?,
        _ => return Err(ConfigError::ModelType(kind.to_string())),
    };
    config.finish(HARMLESS)?;
    Ok(imported)
}

/// Fields that all kinds of models have, and that must not ask for anything.
fn base(config: &mut Config<'_>) -> Result<(), ConfigError> {
    config.off("is_encoder_decoder", "encoder and decoder")?;
    config.off("tie_encoder_decoder", "encoder and decoder")?;
    config.off("add_cross_attention", "attention to another sequence")?;
    let pruned = config.get("pruned_heads");
    match pruned.filter(|it| it.as_object().is_none_or(|it| !it.is_empty())) {
        None => Ok(()),
        Some(it) => Err(config.unsupported("pruned_heads", it, "layers of different heads")),
    }
}

/// Fields of an object; remembers which were read.
struct Config<'a> {
    object: &'a Map<String, Value>,
    /// Of the field that holds the object; empty or ends in a dot.
    path: &'a str,
    used: BTreeSet<&'static str>,
}

impl<'a> Config<'a> {
    /// A field; `null` is as good as none.
    fn get(&mut self, field: &'static str) -> Option<&'a Value> {
        self.used.insert(field);
        self.object.get(field).filter(|it| !it.is_null())
    }

    fn wrong(&self, field: &str, found: Option<&Value>, expected: &'static str) -> ConfigError {
        let found = found.map_or("missing".to_string(), Value::to_string);
        ConfigError::Field { field: format!("{}{field}", self.path), found, expected }
    }

    fn unsupported(
        &self,
        field: &str,
        found: impl ToString,
        missing: impl Into<String>,
    ) -> ConfigError {
        let (field, found) = (format!("{}{field}", self.path), found.to_string());
        ConfigError::Unsupported { field, found, missing: missing.into() }
    }

    fn required(
        &mut self,
        field: &'static str,
        expected: &'static str,
    ) -> Result<&'a Value, ConfigError> {
        self.get(field).ok_or_else(|| self.wrong(field, None, expected))
    }

    fn optional_size(&mut self, field: &'static str) -> Result<Option<u64>, ConfigError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        let size = value.as_u64().filter(|&it| it > 0);
        size.map(Some).ok_or_else(|| self.wrong(field, Some(value), "a size"))
    }

    fn size(&mut self, field: &'static str) -> Result<u64, ConfigError> {
        self.optional_size(field)?.ok_or_else(|| self.wrong(field, None, "a size"))
    }

    fn number(&mut self, field: &'static str, default: f64) -> Result<f64, ConfigError> {
        let Some(value) = self.get(field) else { return Ok(default) };
        value.as_f64().ok_or_else(|| self.wrong(field, Some(value), "a number"))
    }

    fn flag(&mut self, field: &'static str, default: bool) -> Result<bool, ConfigError> {
        let Some(value) = self.get(field) else { return Ok(default) };
        value.as_bool().ok_or_else(|| self.wrong(field, Some(value), "true or false"))
    }

    fn word(&mut self, field: &'static str, default: &'a str) -> Result<&'a str, ConfigError> {
        let Some(value) = self.get(field) else { return Ok(default) };
        value.as_str().ok_or_else(|| self.wrong(field, Some(value), "a word"))
    }

    /// A flag that must be off.
    fn off(&mut self, field: &'static str, missing: &str) -> Result<(), ConfigError> {
        if self.flag(field, false)? {
            return Err(self.unsupported(field, true, missing));
        }
        Ok(())
    }

    /// The row of the embedding that is not trained; a negative one counts from the end, as in
    /// PyTorch.
    fn padding_idx(&mut self, vocab: u64) -> Result<String, ConfigError> {
        let Some(value) = self.get("pad_token_id") else { return Ok(String::new()) };
        let row = value.as_i64().map(|it| if it < 0 { it + vocab as i64 } else { it });
        match row {
            Some(row) if (0..vocab as i64).contains(&row) => Ok(format!(", padding_idx: {row}")),
            _ => Err(self.wrong("pad_token_id", Some(value), "a row of the vocabulary")),
        }
    }

    /// The class must be one of a language model: its heads are what is trained.
    fn architecture(&mut self, known: &[&str]) -> Result<(), ConfigError> {
        let Some(value) = self.get("architectures") else { return Ok(()) };
        let names = value.as_array().map(Vec::as_slice).unwrap_or_default();
        match names.iter().find(|it| !it.as_str().is_some_and(|it| known.contains(&it))) {
            None => Ok(()),
            Some(it) => {
                let missing = format!("head of that kind; it has those of {}", known.join(", "));
                Err(self.unsupported("architectures", it, missing))
            }
        }
    }

    /// Refuses what was not read and is not known to be harmless.
    fn finish(&self, harmless: &[&str]) -> Result<(), ConfigError> {
        if let Some(it) = self.object.get("quantization_config").filter(|it| !it.is_null()) {
            let missing = "reader for quantized weights; take the model in bf16";
            return Err(self.unsupported("quantization_config", it, missing));
        }
        if let Some(it) = self.object.get("auto_map").filter(|it| !it.is_null()) {
            let missing = "way to know what the code that comes with a model computes";
            return Err(self.unsupported("auto_map", it, missing));
        }
        let unknown = self.object.iter().filter(|(field, value)| {
            let known = self.used.contains(field.as_str()) || harmless.contains(&field.as_str());
            !known && !value.is_null()
        });
        let unknown: Vec<String> =
            unknown.map(|it| format!("{}{} = {}", self.path, it.0, it.1)).collect();
        if unknown.is_empty() { Ok(()) } else { Err(ConfigError::Unknown(unknown)) }
    }

    fn name(&self, model_type: &str) -> String {
        let path = self.object.get("_name_or_path").and_then(Value::as_str).unwrap_or_default();
        let last = path.trim_end_matches('/').rsplit('/').next().filter(|it| !it.is_empty());
        last.unwrap_or(model_type).chars().filter(|it| !matches!(it, '"' | '\\')).collect()
    }
}

/// The options of a model that are not its modules.
struct Head<'a> {
    model_type: &'a str,
    /// What a config with options of its own says, one field a line.
    fields: Vec<String>,
    sequence: u64,
    /// Why the sequence cannot be longer.
    longest: String,
    sequence_parallel: bool,
    tied: Option<(&'a str, &'a str)>,
    notes: Vec<String>,
}

impl Head<'_> {
    fn imported(self, config: &Config<'_>, choices: &Choices<'_>, layers: &str) -> Imported {
        let name = choices.name.map_or_else(|| config.name(self.model_type), str::to_string);
        let Head { model_type, fields, sequence, longest, sequence_parallel, tied, notes } = self;
        let mut text = format!(
            "// Made by `planc import hf` from a config.json of model_type \"{model_type}\".\n\
             // The config does not say what is marked `chosen`: set it as you need.\n"
        );
        for note in &notes {
            let _ = writeln!(text, "// Note: {note}.");
        }
        text.push_str("Model(\n");
        let mut lines = vec![
            (format!("name: \"{name}\","), None),
            (format!("batch: Global({}),", choices.batch), Some(": sequences of a step".into())),
            (format!("sequence: {sequence},"), Some(format!(": {longest}"))),
        ];
        let line = |code: &str, why: &str| (code.to_string(), Some(why.to_string()));
        if sequence_parallel {
            lines.push(line("sequence_parallel: true,", "; without tp it does nothing"));
        }
        lines.push(line("precision: (compute: bf16),", "; master weights stay in f32"));
        lines.extend(fields.into_iter().map(|it| (it, None)));
        lines.extend([
            line("optimizer: AdamW(betas: (0.9, 0.95), weight_decay: 0.1),", ""),
            line("schedule: (lr: 1e-5, warmup: 100),", ", to train on from imported weights"),
            line("clip_norm: 1.0,", ""),
        ]);
        lines.extend(tied.map(|it| (format!("tied: [(\"{}\", \"{}\")],", it.0, it.1), None)));
        for (code, why) in lines {
            let _ = match why {
                None => writeln!(text, "    {code}"),
                Some(why) => writeln!(text, "    {code:<58} // chosen{why}"),
            };
        }
        let _ = write!(text, "    layers: [\n{layers}    ],\n)\n");
        Imported { text, notes }
    }
}

/// `0.02`, `1e-5`, `500000`: as short as RON reads it back.
fn number(it: f64) -> String {
    let text = format!("{it:?}");
    text.strip_suffix(".0").map_or(text.clone(), str::to_string)
}

/// A sequence: as asked for, or as long as the model takes, within reason.
fn sequence(
    config: &Config<'_>,
    choices: &Choices<'_>,
    positions: (&'static str, u64),
    window: Option<u64>,
) -> Result<(u64, String), ConfigError> {
    let (field, positions) = positions;
    let longest = window.map_or(positions, |it| it.min(positions));
    let wanted = choices.sequence.unwrap_or(longest.min(SEQUENCE));
    if let Some(window) = window.filter(|&it| wanted > it) {
        let missing = format!(
            "sliding window, which a sequence of {wanted} needs; take one of at most {window}, \
             which lies within the window"
        );
        return Err(config.unsupported("sliding_window", window, missing));
    }
    let why = match window {
        Some(window) if window < positions => {
            format!("at most {window}, the sliding window, which planc does not have")
        }
        _ => format!("the model was made for up to {positions} ({field})"),
    };
    Ok((wanted, why))
}

/// Dropout of attention probabilities, which there is none of.
fn attention_dropout(
    config: &mut Config<'_>,
    field: &'static str,
    default: f64,
    notes: &mut Vec<String>,
) -> Result<(), ConfigError> {
    let rate = config.number(field, default)?;
    if rate != 0.0 {
        notes.push(format!(
            "`{field}` is {}; planc has no dropout of attention probabilities and trains without",
            number(rate)
        ));
    }
    Ok(())
}

/// The gated activation of a name in `transformers`' table.
fn gated(config: &Config<'_>, field: &str, word: &str) -> Result<&'static str, ConfigError> {
    Ok(match word {
        "silu" | "swish" => "swiglu",
        "gelu" => "geglu",
        "gelu_new" | "gelu_pytorch_tanh" => "geglu_tanh",
        "relu" => "reglu",
        _ => return Err(config.unsupported(field, word, "gated activation of that name")),
    })
}

/// The same without a gate.
fn plain(config: &Config<'_>, field: &str, word: &str) -> Result<&'static str, ConfigError> {
    Ok(match word {
        "gelu" => "gelu",
        "gelu_new" | "gelu_pytorch_tanh" => "gelu_tanh",
        "relu" => "relu",
        "silu" | "swish" => "silu",
        "relu2" => "srelu",
        _ => return Err(config.unsupported(field, word, "activation of that name")),
    })
}

/// `rope: (..)`, from the fields of the old form or the object of the new one.
fn rope(config: &mut Config<'_>) -> Result<String, ConfigError> {
    let object = |config: &mut Config<'_>, field| -> Result<Map<String, Value>, ConfigError> {
        let Some(value) = config.get(field) else { return Ok(Map::new()) };
        let object = value.as_object().cloned();
        object.ok_or_else(|| config.wrong(field, Some(value), "an object"))
    };
    let theta = config.number("rope_theta", 10000.0)?;
    let old = object(config, "rope_scaling")?;
    let new = object(config, "rope_parameters")?;
    let (path, scaling) =
        if new.is_empty() { ("rope_scaling.", &old) } else { ("rope_parameters.", &new) };
    let mut scaling = Config { object: scaling, path, used: BTreeSet::new() };
    let theta = scaling.number("rope_theta", theta)?;
    let partial = config.number("partial_rotary_factor", 1.0)?;
    let partial = scaling.number("partial_rotary_factor", partial)?;
    if partial != 1.0 {
        let missing = "rotation of only a part of a head";
        return Err(config.unsupported("partial_rotary_factor", partial, missing));
    }
    let kind = scaling.word("type", "default")?;
    let kind = scaling.word("rope_type", kind)?;
    let theta = number(theta);
    let res = match kind {
        "default" => format!("rope: (theta: {theta})"),
        "llama3" => {
            let factor = number(scaling.number("factor", f64::NAN)?);
            let low = number(scaling.number("low_freq_factor", f64::NAN)?);
            let high = number(scaling.number("high_freq_factor", f64::NAN)?);
            for (field, it) in
                [("factor", &factor), ("low_freq_factor", &low), ("high_freq_factor", &high)]
            {
                if it == "NaN" {
                    return Err(scaling.wrong(field, None, "a number"));
                }
            }
            let original = scaling.size("original_max_position_embeddings")?;
            format!(
                "rope: (theta: {theta}, scaling: Llama3(\n                        \
                 factor: {factor}, low_freq_factor: {low}, high_freq_factor: {high},\n                        \
                 original_max_position_embeddings: {original},\n                    ))"
            )
        }
        _ => {
            return Err(scaling.unsupported(
                "rope_type",
                kind,
                "scaling of rotations of that kind",
            ));
        }
    };
    // `factor` without a kind that reads it would be ignored.
    scaling.finish(&[])?;
    Ok(res)
}

/// The window beyond which tokens do not see each other, if there is one.
fn window(config: &mut Config<'_>, kind: &str) -> Result<Option<u64>, ConfigError> {
    let types = config.get("layer_types");
    let layers = types.and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    if let Some(it) = layers
        .iter()
        .find(|it| !matches!(it.as_str(), Some("full_attention" | "sliding_attention")))
    {
        return Err(config.unsupported("layer_types", it, "attention of that kind"));
    }
    let window = match kind {
        "llama" => None,
        "mistral" => config.optional_size("sliding_window")?,
        _ => {
            let uses = config.flag("use_sliding_window", false)?;
            config.get("max_window_layers");
            config.get("sliding_window");
            if uses { config.optional_size("sliding_window")? } else { None }
        }
    };
    let slides = layers.iter().any(|it| it.as_str() == Some("sliding_attention"));
    if slides && window.is_none() {
        let missing = "sliding window, and no `sliding_window` says how wide it is";
        return Err(config.unsupported("layer_types", "sliding_attention", missing));
    }
    Ok(window)
}

/// Llama, Mistral, Qwen2 and Qwen3.
fn llama(
    config: &mut Config<'_>,
    kind: &str,
    choices: &Choices<'_>,
) -> Result<Imported, ConfigError> {
    config.architecture(match kind {
        "llama" => &["LlamaForCausalLM"],
        "mistral" => &["MistralForCausalLM"],
        "qwen2" => &["Qwen2ForCausalLM"],
        _ => &["Qwen3ForCausalLM"],
    })?;
    // A word of other models: these are decoders whatever it says.
    config.get("is_decoder");
    config.off("use_mrope", "rotation in several dimensions")?;
    let (vocab, dim) = (config.size("vocab_size")?, config.size("hidden_size")?);
    let layers = config.size("num_hidden_layers")?;
    let heads = config.size("num_attention_heads")?;
    let kv_heads = config.optional_size("num_key_value_heads")?.unwrap_or(heads);
    let head_dim = config.optional_size("head_dim")?;
    let head_dim = head_dim.or((kind == "qwen3").then_some(128)).filter(|it| it * heads != dim);
    let ffn = config.size("intermediate_size")?;
    let activation = config.word("hidden_act", "silu")?;
    let activation = gated(config, "hidden_act", activation)?;
    let eps = number(config.number("rms_norm_eps", 1e-6)?);
    let std = number(config.number("initializer_range", 0.02)?);
    let padding = config.padding_idx(vocab)?;
    let tied = config.flag("tie_word_embeddings", false)?;
    let positions = config.size("max_position_embeddings")?;
    let mut notes = Vec::new();
    attention_dropout(config, "attention_dropout", 0.0, &mut notes)?;
    let attention_bias = match kind {
        "llama" | "qwen3" => config.flag("attention_bias", false)?,
        _ => false,
    };
    let mlp_bias = kind == "llama" && config.flag("mlp_bias", false)?;
    let window = window(config, kind)?;
    let rope = rope(config)?;
    let mut attention = vec![format!("heads: {heads}")];
    if kv_heads != heads {
        attention.push(format!("kv_heads: {kv_heads}"));
    }
    attention.extend(head_dim.map(|it| format!("head_dim: {it}")));
    if kind == "qwen3" {
        attention.push(format!("qk_norm: RmsNorm(eps: {eps})"));
    }
    attention.push(rope);
    if kind == "qwen2" {
        attention.push("qkv_bias: true".into());
    }
    if attention_bias {
        attention.push("bias: true".into());
    }
    let mut attention = attention.join(", ");
    if attention.len() > 80 {
        attention = attention.replacen(", rope", ",\n                    rope", 1);
        attention = format!("\n                    {attention},\n                ");
    }
    let mlp_bias = if mlp_bias { ", bias: true" } else { "" };
    let text = format!(
        r#"        Embedding(name: "model.embed_tokens", vocab: {vocab}, dim: {dim}{padding}),
        Repeat(n: {layers}, prefix: "model.layers", body: [
            TransformerLayer(
                norm: RmsNorm(eps: {eps}),
                attention: ({attention}),
                mlp: (ffn: {ffn}, activation: {activation}{mlp_bias}),
                bias: false,
            ),
        ]),
        RmsNorm(name: "model.norm", eps: {eps}),
        LmHead(name: "lm_head"),
        CrossEntropy(),
"#
    );
    let positions = ("max_position_embeddings", positions);
    let (sequence, longest) = sequence(config, choices, positions, window)?;
    let head = Head {
        model_type: kind,
        fields: vec![format!("init: Normal(std: {std}),")],
        sequence,
        longest,
        sequence_parallel: true,
        tied: tied.then_some(("lm_head.weight", "model.embed_tokens.weight")),
        notes,
    };
    Ok(head.imported(config, choices, &text))
}

fn gpt2(config: &mut Config<'_>, choices: &Choices<'_>) -> Result<Imported, ConfigError> {
    config.architecture(&["GPT2LMHeadModel"])?;
    config.off(
        "scale_attn_by_inverse_layer_idx",
        "scale of attention that differs between the layers of a `Repeat`",
    )?;
    // How the same is computed, and heads of other tasks.
    for field in [
        "is_decoder",
        "n_ctx",
        "reorder_and_upcast_attn",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
        "pad_token_id",
    ] {
        config.get(field);
    }
    let (vocab, dim) = (config.size("vocab_size")?, config.size("n_embd")?);
    let (layers, heads) = (config.size("n_layer")?, config.size("n_head")?);
    let positions = config.size("n_positions")?;
    let ffn = config.optional_size("n_inner")?.unwrap_or(4 * dim);
    let activation = config.word("activation_function", "gelu_new")?;
    let activation = plain(config, "activation_function", activation)?;
    let eps = number(config.number("layer_norm_epsilon", 1e-5)?);
    let std = config.number("initializer_range", 0.02)?;
    let tied = config.flag("tie_word_embeddings", true)?;
    let scale = if config.flag("scale_attn_weights", true)? { "" } else { ", scale: 1.0" };
    let mut notes = Vec::new();
    attention_dropout(config, "attn_pdrop", 0.1, &mut notes)?;
    let dropout = match config.number("embd_pdrop", 0.1)? {
        0.0 => String::new(),
        it => format!("        Dropout(rate: {}),\n", number(it)),
    };
    let hidden = match config.number("resid_pdrop", 0.1)? {
        0.0 => String::new(),
        it => format!("                hidden_dropout: {},\n", number(it)),
    };
    let text = format!(
        r#"        Embedding(name: "transformer.wte", vocab: {vocab}, dim: {dim}),
        PositionEmbedding(name: "transformer.wpe", positions: {positions}),
{dropout}        Repeat(n: {layers}, prefix: "transformer.h", body: [
            TransformerLayer(
                norm: LayerNorm(eps: {eps}),
                attention: (heads: {heads}{scale}),
                mlp: (ffn: {ffn}, activation: {activation}),
{hidden}            ),
        ]),
        LayerNorm(name: "transformer.ln_f", eps: {eps}),
        LmHead(name: "lm_head"),
        CrossEntropy(),
"#
    );
    // Projections into the residual stream start smaller by the root of the branches.
    let output_std = number(std / ((2 * layers) as f64).sqrt());
    let (sequence, longest) = sequence(config, choices, ("n_positions", positions), None)?;
    let head = Head {
        model_type: "gpt2",
        fields: vec![
            "names: Gpt2,".into(),
            format!("init: Normal(std: {}),", number(std)),
            format!("output_init: Normal(std: {output_std}),"),
        ],
        sequence,
        longest,
        sequence_parallel: false,
        tied: tied.then_some(("lm_head.weight", "transformer.wte.weight")),
        notes,
    };
    Ok(head.imported(config, choices, &text))
}

/// BERT with its head for masked tokens. Norms stand behind each branch, so a layer is written as
/// residual branches and norms.
fn bert(config: &mut Config<'_>, choices: &Choices<'_>) -> Result<Imported, ConfigError> {
    config.architecture(&["BertForMaskedLM", "BertForPreTraining"])?;
    config.off("is_decoder", "causal BERT")?;
    for field in [
        "directionality",
        "pooler_fc_size",
        "pooler_num_attention_heads",
        "pooler_num_fc_layers",
        "pooler_size_per_head",
        "pooler_type",
    ] {
        config.get(field);
    }
    let kind = config.word("position_embedding_type", "absolute")?;
    if kind != "absolute" {
        let missing = "relative positions";
        return Err(config.unsupported("position_embedding_type", kind, missing));
    }
    let (vocab, dim) = (config.size("vocab_size")?, config.size("hidden_size")?);
    let layers = config.size("num_hidden_layers")?;
    let heads = config.size("num_attention_heads")?;
    let ffn = config.size("intermediate_size")?;
    let positions = config.size("max_position_embeddings")?;
    let types = config.optional_size("type_vocab_size")?.unwrap_or(2);
    let activation = config.word("hidden_act", "gelu")?;
    let activation = plain(config, "hidden_act", activation)?;
    let eps = number(config.number("layer_norm_eps", 1e-12)?);
    let std = number(config.number("initializer_range", 0.02)?);
    let padding = config.padding_idx(vocab)?;
    let tied = config.flag("tie_word_embeddings", true)?;
    let mut notes = vec![
        "planc's data has no token types: all tokens are of type 0".to_string(),
        "pooler and next-sentence head are left out; of BERT's heads, that for masked tokens is trained"
            .to_string(),
        "masked tokens need data with `labels` of their own, -100 where no token was masked (docs/model.md)"
            .to_string(),
    ];
    attention_dropout(config, "attention_probs_dropout_prob", 0.1, &mut notes)?;
    let (dropout, residual) = match config.number("hidden_dropout_prob", 0.1)? {
        0.0 => (String::new(), String::new()),
        it => (
            format!("        Dropout(rate: {}),\n", number(it)),
            format!("dropout: {}, ", number(it)),
        ),
    };
    let text = format!(
        r#"        Embedding(name: "bert.embeddings.word_embeddings", vocab: {vocab}, dim: {dim}{padding}),
        PositionEmbedding(name: "bert.embeddings.position_embeddings", positions: {positions}),
        // Adds row 0 of the table of token types to every token.
        Block(
            name: "bert.embeddings.token_type_embeddings",
            inputs: ["x"],
            params: {{"weight": (shape: [{types}, {dim}])}},
            ops: [
                (op: "slice_dim(dim:0, start:0, len:1)", inputs: ["weight"], outputs: ["row"]),
                (op: "merge_dims(dim:0)", inputs: ["row"], outputs: ["type"]),
                (op: "bias_add", inputs: ["x", "type"], outputs: ["sum"]),
            ],
            outputs: ["sum"],
            placements: {{"sum": Stream}},
        ),
        LayerNorm(name: "bert.embeddings.LayerNorm", eps: {eps}),
{dropout}        Repeat(n: {layers}, prefix: "bert.encoder.layer", body: [
            Residual({residual}body: [
                MultiheadAttention(
                    name: "attention",
                    heads: {heads},
                    causal: false,
                    names: {{
                        "q_proj": "self.query",
                        "k_proj": "self.key",
                        "v_proj": "self.value",
                        "o_proj": "output.dense",
                    }},
                ),
            ]),
            LayerNorm(name: "attention.output.LayerNorm", eps: {eps}),
            Residual({residual}body: [
                Linear(name: "intermediate.dense", out_features: {ffn}, parallel_mode: Column),
                Activation(kind: {activation}),
                Linear(name: "output.dense", out_features: {dim}, parallel_mode: Row),
            ]),
            LayerNorm(name: "output.LayerNorm", eps: {eps}),
        ]),
        Linear(name: "cls.predictions.transform.dense", out_features: {dim}),
        Activation(kind: {activation}),
        LayerNorm(name: "cls.predictions.transform.LayerNorm", eps: {eps}),
        LmHead(name: "cls.predictions.decoder", bias: true),
        CrossEntropy(),
"#
    );
    let positions = ("max_position_embeddings", positions);
    let (sequence, longest) = sequence(config, choices, positions, None)?;
    let owner = "bert.embeddings.word_embeddings.weight";
    let head = Head {
        model_type: "bert",
        fields: vec![format!("init: Normal(std: {std}),")],
        sequence,
        longest,
        sequence_parallel: false,
        tied: tied.then_some(("cls.predictions.decoder.weight", owner)),
        notes,
    };
    Ok(head.imported(config, choices, &text))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LLAMA: &str = r#"{"model_type": "llama", "vocab_size": 256, "hidden_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 160,
        "max_position_embeddings": 128"#;

    fn import(fields: &str) -> Result<Imported, ConfigError> {
        let choices = Choices { name: Some("m"), batch: 4, sequence: None };
        model_ron(&format!("{LLAMA}{fields}}}"), &choices)
    }

    #[track_caller]
    fn check(fields: &str, code: &str, expect: &str) {
        let error = import(fields).expect_err(fields);
        assert_eq!((error.code(), error.to_string().as_str()), (code, expect));
    }

    #[test]
    fn what_changes_the_model_is_refused() {
        check(
            ", \"rope_scaling\": {\"type\": \"linear\", \"factor\": 2.0}",
            "PL0782",
            "`rope_scaling.rope_type` is linear, and planc has no scaling of rotations of that kind",
        );
        check(
            ", \"partial_rotary_factor\": 0.5",
            "PL0782",
            "`partial_rotary_factor` is 0.5, and planc has no rotation of only a part of a head",
        );
        check(
            ", \"hidden_act\": \"gelu_fast\"",
            "PL0782",
            "`hidden_act` is gelu_fast, and planc has no gated activation of that name",
        );
        check(
            ", \"architectures\": [\"LlamaForSequenceClassification\"]",
            "PL0782",
            "`architectures` is \"LlamaForSequenceClassification\", and planc has no head of that kind; it \
             has those of LlamaForCausalLM",
        );
        check(
            ", \"quantization_config\": {\"bits\": 4}",
            "PL0782",
            "`quantization_config` is {\"bits\":4}, and planc has no reader for quantized weights; take \
             the model in bf16",
        );
        check(
            ", \"logit_scale\": 2.0, \"clip_qkv\": 8",
            "PL0783",
            "unknown fields `clip_qkv = 8`, `logit_scale = 2.0`, which might change what the model computes",
        );
        // Inside an object, too.
        check(
            ", \"rope_scaling\": {\"rope_type\": \"default\", \"factor\": 2.0}",
            "PL0783",
            "unknown field `rope_scaling.factor = 2.0`, which might change what the model computes",
        );
    }

    #[test]
    fn what_cannot_be_read_is_said() {
        check(
            ", \"rms_norm_eps\": \"small\"",
            "PL0780",
            "`rms_norm_eps` is \"small\" and must be a number",
        );
        check(
            ", \"num_key_value_heads\": -1",
            "PL0780",
            "`num_key_value_heads` is -1 and must be a size",
        );
        let choices = Choices { name: None, batch: 4, sequence: None };
        let error = |text: &str| model_ron(text, &choices).expect_err(text);
        assert_eq!(error("[]").code(), "PL0780");
        let missing = error("{\"model_type\": \"gpt2\"}");
        assert_eq!(missing.to_string(), "`vocab_size` is missing and must be a size");
        let unknown = error("{\"model_type\": \"mixtral\"}");
        assert_eq!(unknown.code(), "PL0781");
        assert!(
            unknown.to_string().contains("\"mixtral\"; planc reads llama, mistral,"),
            "{unknown}"
        );
    }

    /// Both forms of `transformers` say the same.
    #[test]
    fn rotations_are_read_in_the_old_form_and_the_new() {
        let llama3 = "\"factor\": 8.0, \"low_freq_factor\": 1.0, \"high_freq_factor\": 4.0, \
                      \"original_max_position_embeddings\": 8192, \"rope_type\": \"llama3\"";
        let old = format!(", \"rope_theta\": 500000.0, \"rope_scaling\": {{{llama3}}}");
        let new = format!(", \"rope_parameters\": {{\"rope_theta\": 500000.0, {llama3}}}");
        let old = import(&old).expect("the old form").text;
        assert_eq!(old, import(&new).expect("the new form").text);
        assert!(old.contains("rope: (theta: 500000, scaling: Llama3("), "{old}");
    }

    #[test]
    fn options_of_attention_and_mlp_are_kept() {
        let text = import(
            ", \"attention_bias\": true, \"mlp_bias\": true, \"head_dim\": 32, \"pad_token_id\": -1, \"tie_word_embeddings\": true",
        );
        let text = text.expect("a model").text;
        for expect in [
            "padding_idx: 255)",
            "head_dim: 32, rope: (theta: 10000), bias: true)",
            "mlp: (ffn: 160, activation: swiglu, bias: true)",
            "tied: [(\"lm_head.weight\", \"model.embed_tokens.weight\")]",
        ] {
            assert!(text.contains(expect), "no `{expect}` in {text}");
        }
        let noted = import(", \"attention_dropout\": 0.1").expect("a model");
        assert!(noted.text.contains(&format!("// Note: {}.", noted.notes[0])), "{}", noted.text);
    }
}
