//! Every name in a `model.ron` matches something: a corpus of models that write every field of the schema,
//! each name of which is replaced by one that nothing has.
//!
//! The test asks serde for the fields of every struct and the words of every list (the errors of unknown ones
//! carry them), so a new field or variant that the corpus lacks fails `the_corpus_writes_every_field`, and a
//! new name that is looked up nowhere fails `a_name_that_matches_nothing_is_refused`.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::*;

/// Models with their meshes.
const CORPUS: &[(&str, &str)] = &[
    (include_str!("names/layers.ron"), "2x2x2x2"),
    (include_str!("names/parts.ron"), "2x2"),
    (include_str!("names/plain.ron"), "2"),
];

/// Fields that give something a name: any is right. `*` stands for every module.
const DECLARES: &[&str] = &[
    "Model.name",
    "Model.meshes value",
    "*.name",
    "Repeat.prefix",
    "*.names value",
    "*.fused key",
    "Block.inputs",
    "Block.params key",
    "ops.outputs",
];

/// Modules without a GEMM, which refuse `weight_mesh`.
const WITHOUT_GEMM: &[&str] = &[
    "Activation",
    "CrossEntropy",
    "DotProductAttention",
    "Dropout",
    "Embedding",
    "LayerNorm",
    "PositionEmbedding",
    "RmsNorm",
    "Rope",
];

/// The codes of the error of a name that matches nothing, by field; the first field that fits counts.
const CODES: &[(&str, &[&str])] = &[
    // Names of values, and in their placements names of axes.
    ("Block.placements key", &["PL0201", "PL0214"]),
    ("Block.outputs", &["PL0214"]),
    ("ops.op", &["PL0213"]),
    ("ops.inputs", &["PL0214"]),
    ("*.placements key", &["PL0201"]),
    ("*.axes", &["PL0201"]),
    ("*.data_parallel", &["PL0201"]),
    ("*.replicas", &["PL0201"]),
    ("*.tp_mesh", &["PL0201"]),
    ("*.weight_mesh", &["PL0201"]),
    ("*.checkpoint", &["PL0105"]),
    ("*.names key", &["PL0209"]),
    ("*.decay", &["PL0209"]),
    ("*.no_decay", &["PL0209"]),
    ("*.frozen", &["PL0209"]),
    ("*.tied", &["PL0209"]),
    ("*.parameters key", &["PL0209"]),
];

/// A name that nothing in the corpus has.
const NOTHING: &str = "zz_nothing";

/// A quoted string of a source.
struct Name {
    /// The struct and the field that it is in, as in `Block.params key`.
    place: String,
    /// The byte range, quotes included.
    bytes: Range<usize>,
}

/// The names, words and structs of a source.
#[derive(Default)]
struct Parts {
    names: Vec<Name>,
    /// Words that are no keys, with the bytes of what stands in brackets behind them.
    words: Vec<(Range<usize>, Option<Range<usize>>)>,
    /// The byte range in each pair of round brackets, and the keys there.
    structs: Vec<(Range<usize>, BTreeSet<String>)>,
}

/// An open bracket.
struct Open {
    bracket: u8,
    at: usize,
    /// The word before it, or the field that it is the value of.
    owner: String,
    /// Index in [`Parts::words`] of the word before it.
    word: Option<usize>,
    /// The field at hand.
    field: String,
    keys: BTreeSet<String>,
    /// The map's key has been read.
    has_key: bool,
}

/// Reads RON as the corpus writes it: comments of a line, plain strings.
fn parts(source: &str) -> Parts {
    let (bytes, mut res) = (source.as_bytes(), Parts::default());
    let mut open: Vec<Open> = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        let start = at;
        at += 1;
        let end = |stop: &dyn Fn(u8) -> bool| {
            bytes[at..].iter().position(|&it| stop(it)).map_or(bytes.len(), |n| at + n)
        };
        match bytes[start] {
            b'/' => at = end(&|it| it == b'\n'),
            b'"' => {
                at = end(&|it| it == b'"') + 1;
                let key = source[at..].starts_with(':');
                let holder = open.iter().rev().find(|it| !it.field.is_empty()).expect("a field");
                let in_map = open.last().is_some_and(|it| it.bracket == b'{');
                let mut around = open.iter().rev().take_while(|it| it.field.is_empty());
                let value = around.any(|it| it.has_key);
                let role = match (in_map && key, value) {
                    (true, _) => " key",
                    (_, true) => " value",
                    _ => "",
                };
                let place = format!("{}.{}{role}", holder.owner, holder.field);
                if let Some(it) = open.last_mut().filter(|_| in_map) {
                    it.has_key = key;
                }
                res.names.push(Name { place, bytes: start..at });
            }
            bracket @ (b'(' | b'[' | b'{') => {
                let before = res.words.last().filter(|it| it.0.end == start);
                let word = before.map(|_| res.words.len() - 1);
                let field = open.iter().rev().map(|it| &it.field).find(|it| !it.is_empty());
                let owner = match before {
                    Some(it) => source[it.0.clone()].to_string(),
                    None => field.cloned().unwrap_or_default(),
                };
                let (field, keys, has_key) = (String::new(), BTreeSet::new(), false);
                open.push(Open { bracket, at: start, owner, word, field, keys, has_key });
            }
            b')' | b']' | b'}' => {
                let it = open.pop().expect("an open bracket");
                if let Some(word) = it.word {
                    res.words[word].1 = Some(it.at..at);
                }
                if it.bracket == b'(' {
                    res.structs.push((it.at..at, it.keys));
                }
            }
            b',' => {
                if let Some(it) = open.last_mut() {
                    it.has_key = false;
                }
            }
            it if it.is_ascii_alphanumeric() => {
                at = end(&|it| !(it.is_ascii_alphanumeric() || b"_.-".contains(&it)));
                let word = source[start..at].to_string();
                let is_key = source[at..].starts_with(':');
                match open.last_mut() {
                    Some(it) if is_key && it.bracket == b'{' => it.has_key = true,
                    Some(it) if is_key => {
                        it.keys.insert(word.clone());
                        it.field = word;
                    }
                    _ => res.words.push((start..at, None)),
                }
            }
            _ => {}
        }
    }
    res
}

fn with(source: &str, bytes: Range<usize>, text: &str) -> String {
    format!("{}{text}{}", &source[..bytes.start], &source[bytes.end..])
}

fn elaborated(source: &str, mesh: &str) -> Result<Graph, ModelError> {
    elaborate(&parse(source)?, &MeshSpec::parse(mesh)?)
}

#[test]
fn the_corpus_writes_every_field() {
    // The fields that the corpus writes, by the list of the fields that are allowed.
    let mut fields: BTreeMap<Vec<String>, (String, BTreeSet<String>)> = BTreeMap::new();
    let mut words: BTreeMap<Vec<String>, BTreeSet<String>> = BTreeMap::new();
    for (source, mesh) in CORPUS {
        elaborated(source, mesh).unwrap_or_else(|it| panic!("{it} at {}", it.at));
        let parts = parts(source);
        for (bytes, keys) in &parts.structs {
            let inside = bytes.start + 1..bytes.start + 1;
            let found = parse(&with(source, inside, "zz: 1, ")).map_err(|it| *it.problem);
            if let Err(Problem::UnknownField { owner, known, .. }) = found {
                let owner = owner.unwrap_or_default();
                let known = fields.entry(known).or_insert((owner, BTreeSet::new()));
                known.1.extend(keys.iter().cloned());
            }
        }
        for (bytes, _) in &parts.words {
            let found = parse(&with(source, bytes.clone(), "Zz")).map_err(|it| *it.problem);
            if let Err(Problem::UnknownVariant { known, .. }) = found {
                words.entry(known).or_default().insert(source[bytes.clone()].to_string());
            }
        }
    }
    for (known, (owner, written)) in &fields {
        for field in known {
            let is_refused = field == "weight_mesh" && WITHOUT_GEMM.contains(&owner.as_str());
            assert!(
                written.contains(field) || is_refused,
                "the corpus never writes `{field}` of `{owner}`"
            );
        }
    }
    assert!(fields.len() > 30 && words.len() > 15, "{} structs", fields.len());
    // A word that stands alone has no fields.
    for (source, _) in CORPUS {
        for (bytes, behind) in parts(source).words {
            let whole = bytes.start..behind.map_or(bytes.end, |it| it.end);
            let found = parse(&with(source, bytes, "Zz")).map_err(|it| *it.problem);
            let Err(Problem::UnknownVariant { known, .. }) = found else { continue };
            for word in &known {
                let alone = || parse(&with(source, whole.clone(), word)).is_ok();
                assert!(
                    words[&known].contains(word) || alone(),
                    "the corpus never writes `{word}`"
                );
            }
        }
    }
}

#[test]
fn a_name_that_matches_nothing_is_refused() {
    let (mut refused, mut declared, mut wrong) = (0, BTreeSet::new(), BTreeSet::new());
    for (source, mesh) in CORPUS {
        for Name { place, bytes } in parts(source).names {
            let field = place.split_once('.').expect("an owner").1;
            let any = format!("*.{field}");
            let is_here = |it: &str| it == place || it == any;
            let replaced = with(source, bytes.clone(), &format!("\"{NOTHING}\""));
            let found = elaborated(&replaced, mesh).map_err(|it| it.code());
            if let Some(it) = DECLARES.iter().find(|it| is_here(it)) {
                // It may be refused for another name, which refers to this one.
                declared.insert(*it);
                continue;
            }
            let expected = CODES.iter().find(|it| is_here(it.0)).map_or(&[][..], |it| it.1);
            match found {
                Err(code) if expected.contains(&code) => refused += 1,
                found => {
                    let found = found.map_or_else(|it| it, |_| "accepted");
                    wrong.insert(format!("{place}: {found}, not one of {expected:?}"));
                }
            }
        }
    }
    assert_eq!(wrong, BTreeSet::new(), "names that match nothing");
    assert_eq!(declared, DECLARES.iter().copied().collect());
    assert!(refused > 90, "only {refused} names refer to something");
}
