//! How parameters inside a module are called: Hugging Face's Llama and GPT-2, TransformerEngine.
//!
//! A module asks for the path of a *part* by its key, which is its Llama name. A path that ends in
//! `_` is joined to `weight` without a dot: TransformerEngine's `fc1_weight`.

use std::borrow::Cow;
use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::schema::Ordered;

/// A naming scheme.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Names {
    /// `self_attn.q_proj.weight`, `mlp.gate_proj.weight`: Hugging Face's Llama and its relatives.
    #[default]
    Llama,
    /// `attn.c_attn.q.weight`, `mlp.c_fc.weight`: Hugging Face's GPT-2, its packed `c_attn` apart.
    Gpt2,
    /// `self_attention.layernorm_qkv.query_weight`, `layernorm_mlp.fc1_weight`: TransformerEngine.
    TransformerEngine,
}

impl Names {
    /// The local path of the part `key`.
    pub fn path(self, key: &str) -> &str {
        let table: &[(&str, &str)] = match self {
            Names::Llama => &[],
            Names::Gpt2 => &[
                ("input_layernorm", "ln_1"),
                ("self_attn", "attn"),
                ("q_proj", "c_attn.q"),
                ("k_proj", "c_attn.k"),
                ("v_proj", "c_attn.v"),
                ("o_proj", "c_proj"),
                ("post_attention_layernorm", "ln_2"),
                ("up_proj", "c_fc"),
                ("gate_proj", "c_gate"),
                ("down_proj", "c_proj"),
            ],
            Names::TransformerEngine => &[
                ("input_layernorm", "self_attention.layernorm_qkv.layer_norm_"),
                ("self_attn", "self_attention"),
                ("q_proj", "layernorm_qkv.query_"),
                ("k_proj", "layernorm_qkv.key_"),
                ("v_proj", "layernorm_qkv.value_"),
                ("o_proj", "proj"),
                ("post_attention_layernorm", "layernorm_mlp.layer_norm_"),
                ("mlp", "layernorm_mlp"),
                ("gate_proj", "fc1_gate_"),
                ("up_proj", "fc1_"),
                ("down_proj", "fc2_"),
            ],
        };
        table.iter().find(|it| it.0 == key).map_or(key, |it| it.1)
    }
}

/// Paths of parts that override the naming scheme, from the current module and those around it.
#[derive(Debug, Default)]
pub(super) struct PartNames {
    /// The paths that modules state; those of inner modules come first.
    said: Vec<PartName>,
    /// Keys of parts seen in the innermost module with overrides.
    parts: BTreeSet<String>,
}

#[derive(Debug)]
struct PartName {
    key: String,
    path: String,
    /// True once a part with this key was named.
    found: bool,
}

impl PartNames {
    /// The path of the part `key`.
    pub fn path(&mut self, names: Names, key: &str) -> String {
        if !self.said.is_empty() && !self.parts.contains(key) {
            self.parts.insert(key.to_string());
        }
        let mut path = None;
        // A path that an inner module replaces is still that of a part.
        for it in self.said.iter_mut().filter(|it| it.key == key) {
            it.found = true;
            path.get_or_insert(it.path.as_str());
        }
        path.unwrap_or_else(|| names.path(key)).to_string()
    }

    /// Begins a module that has these paths. Returns the parts of the modules around, for [`PartNames::leave`].
    pub fn enter(&mut self, names: &Ordered<String>) -> BTreeSet<String> {
        let own = names.0.iter().map(|(key, path)| {
            let (key, path) = (key.clone(), path.clone());
            PartName { key, path, found: false }
        });
        self.said.splice(0..0, own);
        std::mem::take(&mut self.parts)
    }

    /// Ends the module. Returns the first of its keys that no part has, with the keys of its parts.
    pub fn leave(
        &mut self,
        names: &Ordered<String>,
        around: BTreeSet<String>,
    ) -> Option<(String, Vec<String>)> {
        let unknown = self.said.drain(..names.0.len()).find(|it| !it.found);
        let parts = std::mem::replace(&mut self.parts, around);
        let unknown = unknown.map(|it| (it.key, parts.iter().cloned().collect()));
        self.parts.extend(parts);
        unknown
    }
}

/// `path.name`, or `pathname` after a `_`.
pub(super) fn join<'a>(path: &'a str, name: &'a str) -> Cow<'a, str> {
    match (path, name) {
        ("", it) | (it, "") => Cow::Borrowed(it),
        _ if path.ends_with('_') => Cow::Owned(format!("{path}{name}")),
        _ => Cow::Owned(format!("{path}.{name}")),
    }
}
