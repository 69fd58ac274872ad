//! A declared mapping between the keys of a foreign checkpoint and the parameters of a model.
//!
//! A rule relates one foreign tensor to one parameter, or to several that are fused in it:
//!
//! ```ron
//! Mapping(
//!     optional_prefixes: ["transformer."],
//!     rules: [
//!         Ignore("{path..}.rotary_emb.inv_freq"),
//!         Map(
//!             from: "transformer.h.{layer}.attn.c_attn.weight",
//!             to: [
//!                 "transformer.h.{layer}.attn.c_attn.q.weight",
//!                 "transformer.h.{layer}.attn.c_attn.k.weight",
//!                 "transformer.h.{layer}.attn.c_attn.v.weight",
//!             ],
//!             transpose: true,
//!         ),
//!     ],
//! )
//! ```
//!
//! `{layer}` stands for a number, `{path..}` for any text, also none. The first rule that matches a key
//! and whose parameters the model has is the one that holds; a key of no rule is its own parameter.
//! So one mapping serves models of several naming schemes.
//!
//! **How segments are fused.** The rows of the foreign tensor (its columns, if it is stored transposed)
//! are `blocks` equal blocks; each holds an equal part of every parameter, one after the other:
//!
//! ```text
//! blocks: Count(1)  [q; k; v]                        GPT-2's c_attn, or [gate; up]
//! blocks: KvHeads   [q0 q1 k0 v0; q2 q3 k1 v1; ..]   TransformerEngine's QKV: by groups of KV heads
//! blocks: SavedTp   [gate0 up0; gate1 up1; ..]       TransformerEngine's gated fc1: by ranks
//! ```
//!
//! Each segment is a parameter of its own, so what was saved on one mesh is cut on any other segment by
//! segment, never as one block of rows.

use std::collections::BTreeMap;
use std::fmt;

use ron::extensions::Extensions;
use serde::{Deserialize, Serialize};

/// See the [module docs](self).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mapping {
    /// What keys may lack at their start: checkpoints of a model without its head leave it out.
    #[serde(default)]
    pub optional_prefixes: Vec<String>,
    /// The rules, of which the first that fits holds.
    pub rules: Vec<Rule>,
}

/// What becomes of keys.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Rule {
    /// Tensors without a counterpart.
    Ignore(Pattern),
    /// The same, if they have no elements.
    IgnoreEmpty(Pattern),
    /// Another name of a tensor that is stored once: left out when it is written, and need not be
    /// there when it is read.
    Alias(Pattern),
    /// A tensor that is a parameter, or several.
    Map(Map),
}

/// One foreign tensor and its parameters.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Map {
    /// The foreign key.
    pub from: Pattern,
    /// The parameters, in the order in which they lie in the tensor.
    pub to: Vec<Pattern>,
    /// The foreign tensor is stored `[in, out]`.
    #[serde(default)]
    pub transpose: bool,
    /// In how many blocks the rows are.
    #[serde(default)]
    pub blocks: Blocks,
    /// An old name: read, never written.
    #[serde(default)]
    pub import_only: bool,
}

/// In how many blocks the rows of a fused tensor are. See the [module docs](self).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Blocks {
    /// So many.
    Count(u64),
    /// One for each key-value head.
    KvHeads,
    /// One for each rank of the tensor-parallel group that saved it.
    SavedTp,
}

impl Default for Blocks {
    fn default() -> Blocks {
        Blocks::Count(1)
    }
}

/// A key with holes. See the [module docs](self).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Pattern(Vec<Part>);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    Text(String),
    Number(String),
    Any(String),
}

/// What the holes of a pattern stand for, by name.
pub type Captures = BTreeMap<String, String>;

/// Why a mapping cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MappingError {
    /// The text is no mapping.
    #[error("line {line}: {why}")]
    Text {
        /// Line of the text, from 1.
        line: usize,
        /// What is wrong there.
        why: String,
    },
    /// The holes of a rule do not fit.
    #[error("`{from}` -> `{to}`: both need the same `{{holes}}`, or it cannot be read backwards")]
    Holes {
        /// The foreign key.
        from: String,
        /// The parameter.
        to: String,
    },
    /// A rule without parameters, or blocks.
    #[error("`{from}` is mapped to nothing; use `Ignore` if it has no counterpart")]
    Nothing {
        /// The foreign key.
        from: String,
    },
}

impl Mapping {
    /// Reads the text of a mapping.
    ///
    /// # Errors
    /// [`MappingError`], for text that is none, and rules that cannot be read backwards.
    pub fn parse(text: &str) -> Result<Mapping, MappingError> {
        let extensions = Extensions::IMPLICIT_SOME | Extensions::UNWRAP_VARIANT_NEWTYPES;
        let options = ron::Options::default().with_default_extension(extensions);
        let mapping: Mapping = options.from_str(text).map_err(|it| MappingError::Text {
            line: it.span.start.line,
            why: it.code.to_string(),
        })?;
        mapping.check()?;
        Ok(mapping)
    }

    /// A mapping that planc knows by name: `hf`, `te`, `te-flat-qkv`.
    pub fn built_in(name: &str) -> Option<Mapping> {
        let te = include_str!("mapping/te.ron");
        let text = match name {
            "hf" => include_str!("mapping/hf.ron").to_string(),
            "te" => te.to_string(),
            // `qkv_weight_interleaved=False`: each rank has its queries, keys and values in turn.
            "te-flat-qkv" => te.replace("KvHeads", "SavedTp"),
            _ => return None,
        };
        Some(Mapping::parse(&text).expect("a test reads the built-in mappings"))
    }

    /// Names of the built-in mappings.
    pub const BUILT_IN: [&str; 3] = ["hf", "te", "te-flat-qkv"];

    fn check(&self) -> Result<(), MappingError> {
        for rule in &self.rules {
            let Rule::Map(map) = rule else { continue };
            if map.to.is_empty() || map.blocks == Blocks::Count(0) {
                return Err(MappingError::Nothing { from: map.from.to_string() });
            }
            if let Some(to) = map.to.iter().find(|it| it.holes() != map.from.holes()) {
                let (from, to) = (map.from.to_string(), to.to_string());
                return Err(MappingError::Holes { from, to });
            }
        }
        Ok(())
    }

    /// What becomes of a foreign tensor in a model whose parameters `has` knows.
    pub fn forward(&self, key: &str, empty: bool, has: &dyn Fn(&str) -> bool) -> Forward {
        let prefixed = self.optional_prefixes.iter().map(|it| format!("{it}{key}"));
        let keys = std::iter::once(key.to_string()).chain(prefixed);
        keys.map(|it| self.forward_exactly(&it, empty, has))
            .find(|it| *it != Forward::Unknown)
            .unwrap_or(Forward::Unknown)
    }

    fn forward_exactly(&self, key: &str, empty: bool, has: &dyn Fn(&str) -> bool) -> Forward {
        for rule in &self.rules {
            match rule {
                Rule::Ignore(pattern) if pattern.matches(key) => return Forward::Ignored,
                Rule::IgnoreEmpty(pattern) if empty && pattern.matches(key) => {
                    return Forward::Ignored;
                }
                Rule::Ignore(_) | Rule::IgnoreEmpty(_) | Rule::Alias(_) => (),
                Rule::Map(map) => {
                    let Some(captures) = map.from.captures(key) else { continue };
                    let params: Vec<String> =
                        map.to.iter().map(|it| it.filled(&captures)).collect();
                    if params.iter().all(|it| has(it)) {
                        let Map { transpose, blocks, .. } = *map;
                        return Forward::Params { params, transpose, blocks };
                    }
                }
            }
        }
        if has(key) {
            let (params, blocks) = (vec![key.to_string()], Blocks::default());
            return Forward::Params { params, transpose: false, blocks };
        }
        Forward::Unknown
    }

    /// The foreign tensor that a parameter is in, where `has` knows the parameters that there are.
    pub fn backward(&self, param: &str, has: &dyn Fn(&str) -> bool) -> Backward {
        for rule in &self.rules {
            let Rule::Map(map) = rule else { continue };
            if map.import_only {
                continue;
            }
            for to in &map.to {
                let Some(captures) = to.captures(param) else { continue };
                let params: Vec<String> = map.to.iter().map(|it| it.filled(&captures)).collect();
                if params.iter().all(|it| has(it)) {
                    let key = map.from.filled(&captures);
                    let Map { transpose, blocks, .. } = *map;
                    return Backward { key, params, transpose, blocks };
                }
            }
        }
        let (key, params) = (param.to_string(), vec![param.to_string()]);
        Backward { key, params, transpose: false, blocks: Blocks::default() }
    }

    /// Whether a key is another name of a tensor that has one.
    pub fn is_alias(&self, key: &str) -> bool {
        self.rules.iter().any(|it| matches!(it, Rule::Alias(pattern) if pattern.matches(key)))
    }
}

/// What becomes of a foreign tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Forward {
    /// Nothing here knows it.
    Unknown,
    /// It has no counterpart, and need not have one.
    Ignored,
    /// It is these parameters.
    Params {
        /// In the order in which they lie in it.
        params: Vec<String>,
        /// It is stored transposed.
        transpose: bool,
        /// In how many blocks its rows are.
        blocks: Blocks,
    },
}

/// A foreign tensor, made of parameters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Backward {
    /// Its key.
    pub key: String,
    /// In the order in which they lie in it.
    pub params: Vec<String>,
    /// It is stored transposed.
    pub transpose: bool,
    /// In how many blocks its rows are.
    pub blocks: Blocks,
}

impl TryFrom<String> for Pattern {
    type Error = String;

    fn try_from(text: String) -> Result<Pattern, String> {
        let mut parts = Vec::new();
        let mut rest = text.as_str();
        while let Some(open) = rest.find('{') {
            if open > 0 {
                parts.push(Part::Text(rest[..open].to_string()));
            }
            let Some(len) = rest[open..].find('}') else {
                return Err(format!("`{text}` opens a {{hole}} and does not close it"));
            };
            let hole = &rest[open + 1..open + len];
            let (name, any) = hole.strip_suffix("..").map_or((hole, false), |it| (it, true));
            if name.is_empty() || !name.bytes().all(|it| it.is_ascii_alphanumeric() || it == b'_') {
                return Err(format!("`{{{hole}}}` of `{text}` is not {{name}} or {{name..}}"));
            }
            let name = name.to_string();
            parts.push(if any { Part::Any(name) } else { Part::Number(name) });
            rest = &rest[open + len + 1..];
        }
        if !rest.is_empty() {
            parts.push(Part::Text(rest.to_string()));
        }
        Ok(Pattern(parts))
    }
}

impl From<Pattern> for String {
    fn from(it: Pattern) -> String {
        it.to_string()
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|it| match it {
            Part::Text(text) => f.write_str(text),
            Part::Number(name) => write!(f, "{{{name}}}"),
            Part::Any(name) => write!(f, "{{{name}..}}"),
        })
    }
}

impl Pattern {
    /// Its holes, sorted.
    fn holes(&self) -> Vec<&str> {
        let names = self.0.iter().filter_map(|it| match it {
            Part::Text(_) => None,
            Part::Number(name) | Part::Any(name) => Some(name.as_str()),
        });
        let mut names: Vec<&str> = names.collect();
        names.sort_unstable();
        names.dedup();
        names
    }

    /// Whether it stands for a key.
    pub fn matches(&self, key: &str) -> bool {
        self.captures(key).is_some()
    }

    /// What its holes stand for in a key; a hole that occurs twice stands for the same text.
    pub fn captures(&self, key: &str) -> Option<Captures> {
        let mut captures = Captures::new();
        capture(&self.0, key, &mut captures).then_some(captures)
    }

    /// The key in which its holes stand for these texts.
    pub fn filled(&self, captures: &Captures) -> String {
        let part = |it: &Part| match it {
            Part::Text(text) => text.clone(),
            Part::Number(name) | Part::Any(name) => captures.get(name).cloned().unwrap_or_default(),
        };
        self.0.iter().map(part).collect()
    }
}

fn capture(parts: &[Part], key: &str, captures: &mut Captures) -> bool {
    let Some((first, rest)) = parts.split_first() else { return key.is_empty() };
    let (name, ends): (&str, Vec<usize>) = match first {
        Part::Text(text) => {
            return key.strip_prefix(text.as_str()).is_some_and(|key| capture(rest, key, captures));
        }
        Part::Number(name) => {
            let digits = key.bytes().take_while(u8::is_ascii_digit).count();
            if digits == 0 {
                return false;
            }
            (name, vec![digits])
        }
        Part::Any(name) => {
            let ends = key.char_indices().map(|it| it.0).chain([key.len()]);
            (name, ends.collect())
        }
    };
    let known = captures.get(name).cloned();
    for end in ends {
        let text = &key[..end];
        if known.as_deref().is_some_and(|it| it != text) {
            continue;
        }
        captures.insert(name.to_string(), text.to_string());
        if capture(rest, &key[end..], captures) {
            return true;
        }
    }
    match known {
        Some(it) => captures.insert(name.to_string(), it),
        None => captures.remove(name),
    };
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pattern(text: &str) -> Pattern {
        Pattern::try_from(text.to_string()).expect("a pattern")
    }

    #[test]
    fn holes_capture_numbers_and_texts() {
        let layer = pattern("h.{layer}.attn.{rest..}");
        let captures = layer.captures("h.12.attn.c_attn.weight").expect("it matches");
        assert_eq!(captures["layer"], "12");
        assert_eq!(captures["rest"], "c_attn.weight");
        assert_eq!(layer.filled(&captures), "h.12.attn.c_attn.weight");
        assert!(!layer.matches("h.x.attn.c_attn.weight"));
        assert!(!layer.matches("h.1.attn"));
        assert!(pattern("{path..}norm.weight").matches("norm.weight"));
        assert!(pattern("{n}.{n}").matches("3.3") && !pattern("{n}.{n}").matches("3.4"));
        // The first text that fits is not the only one.
        assert!(pattern("{path..}.weight").matches("a.weight.weight"));
    }

    #[test]
    fn the_first_rule_whose_parameters_exist_holds() {
        let te = Mapping::built_in("te").expect("it is built in");
        let fc1 = "model.layers.3.layernorm_mlp.fc1_weight";
        let check = |known: &[&str], expect: &[&str], blocks: Blocks| {
            let has = |it: &str| known.contains(&it);
            let Forward::Params { params, transpose, blocks: found } = te.forward(fc1, false, &has)
            else {
                panic!("no rule for {known:?}")
            };
            assert_eq!(
                (params.as_slice(), transpose, found),
                (expect_of(expect).as_slice(), false, blocks)
            );
        };
        fn expect_of(it: &[&str]) -> Vec<String> {
            it.iter().map(|it| it.to_string()).collect()
        }
        let gate = "model.layers.3.layernorm_mlp.fc1_gate_weight";
        check(&[gate, fc1], &[gate, fc1], Blocks::SavedTp);
        check(&[fc1], &[fc1], Blocks::Count(1));
        let (gate, up) =
            ("model.layers.3.mlp.gate_proj.weight", "model.layers.3.mlp.up_proj.weight");
        check(&[gate, up], &[gate, up], Blocks::SavedTp);
        check(&[up], &[up], Blocks::Count(1));
        assert_eq!(te.forward("other", false, &|_| false), Forward::Unknown);
        assert_eq!(te.forward("a.mlp._extra_state", false, &|_| true), Forward::Ignored);
        let bias = "a.proj.bias";
        assert_eq!(te.forward(bias, true, &|_| false), Forward::Ignored);
        assert_eq!(te.forward(bias, false, &|_| false), Forward::Unknown);
    }

    /// What is written under a foreign key is read back from it.
    #[test]
    fn rules_read_backwards() {
        let hf = Mapping::built_in("hf").expect("it is built in");
        let params: Vec<String> = ["q", "k", "v"]
            .iter()
            .map(|it| format!("transformer.h.7.attn.c_attn.{it}.weight"))
            .collect();
        let has = |it: &str| params.iter().any(|param| param == it);
        let back = hf.backward(&params[1], &has);
        assert_eq!(back.key, "transformer.h.7.attn.c_attn.weight");
        assert_eq!((back.params.as_slice(), back.transpose), (params.as_slice(), true));
        let expect =
            Forward::Params { params: params.clone(), transpose: true, blocks: Blocks::Count(1) };
        assert_eq!(hf.forward(&back.key, false, &has), expect);
        // The hub's GPT-2 is saved without its head, and so without the prefix.
        assert_eq!(hf.forward("h.7.attn.c_attn.weight", false, &has), expect);
        assert_eq!(hf.forward("h.7.attn.bias", false, &has), Forward::Ignored);
        assert_eq!(hf.backward("model.norm.weight", &|_| true).key, "model.norm.weight");
        assert!(hf.is_alias("lm_head.weight"));
    }

    #[test]
    fn built_in_mappings_are_read() {
        for name in Mapping::BUILT_IN {
            assert!(Mapping::built_in(name).is_some_and(|it| !it.rules.is_empty()), "{name}");
        }
        assert_eq!(Mapping::built_in("other"), None);
    }

    #[test]
    fn rules_that_cannot_be_read_backwards_are_refused() {
        let check = |rules: &str, expect: &str| {
            let error = Mapping::parse(&format!("Mapping(rules: [{rules}])")).expect_err(rules);
            assert!(error.to_string().contains(expect), "{error}");
        };
        check("Map(from: \"a.{n}\", to: [\"b\"])", "both need the same");
        check("Map(from: \"a\", to: [])", "mapped to nothing");
        check("Map(from: \"a\", to: [\"b\"], blocks: Count(0))", "mapped to nothing");
        check("Map(from: \"a.{n\", to: [\"b\"])", "does not close it");
        check("Map(from: \"a.{}\", to: [\"b\"])", "is not {name} or {name..}");
        check("Other(\"a\")", "line 1");
    }
}
