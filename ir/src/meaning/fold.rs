//! Folding: what differs in numbers of layers only is said once.
//!
//! The first number in a dotted name that is not its end is that of its layer; all names of one thing are
//! written relative to the layer of the first: `model.layers.{i-1}.mlp_residual`.

use std::hash::Hash;

use indexmap::IndexMap;
use rustc_hash::FxBuildHasher;
use serde::{Deserialize, Serialize};

use super::{Call, Held, Tensor};
use crate::graph::Name;

/// What has names; the first that has a layer is the one that others are relative to.
pub trait Named {
    /// All its names, the first first.
    fn names(&mut self) -> Vec<&mut Name>;
}

impl Named for Tensor {
    fn names(&mut self) -> Vec<&mut Name> {
        std::iter::once(&mut self.name).chain(&mut self.aliases).collect()
    }
}

impl Named for Call {
    fn names(&mut self) -> Vec<&mut Name> {
        let Call { results, args, after, before, behind, .. } = self;
        results.iter_mut().chain(args).chain(after).chain(before).chain(behind).collect()
    }
}

impl Named for Held {
    fn names(&mut self) -> Vec<&mut Name> {
        vec![&mut self.name]
    }
}

/// Layers for which something holds.
pub type Layers = Vec<u64>;

/// Something with `{i}` for the number of its layer, and those layers; none for what is in no layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Folded<T> {
    /// What holds.
    #[serde(flatten)]
    pub it: T,
    /// `0..31`, `0..2,5`.
    #[serde(default, skip_serializing_if = "Vec::is_empty", with = "ranges")]
    pub layers: Layers,
}

/// Says once what holds for several layers, in the order of first mention.
pub fn fold<T: Named + Clone + Eq + Hash>(all: &[T]) -> Vec<Folded<T>> {
    let mut res: IndexMap<T, Layers, FxBuildHasher> = IndexMap::default();
    for it in all {
        let mut it = it.clone();
        let base = relative(it.names());
        res.entry(it).or_default().extend(base);
    }
    res.into_iter()
        .map(|(it, mut layers)| {
            layers.sort_unstable();
            Folded { it, layers }
        })
        .collect()
}

/// Writes names relative to the layer of the first that has one, which is returned.
fn relative(mut names: Vec<&mut Name>) -> Option<u64> {
    if names.iter().any(|it| it.contains(['{', '}'])) {
        return None;
    }
    let base = names.iter().find_map(|it| layer(it))?.1;
    for name in &mut names {
        let Some((range, layer)) = layer(name) else { continue };
        let text = match layer.cmp(&base) {
            std::cmp::Ordering::Equal => "{i}".to_string(),
            std::cmp::Ordering::Less => format!("{{i-{}}}", base - layer),
            std::cmp::Ordering::Greater => format!("{{i+{}}}", layer - base),
        };
        name.replace_range(range, &text);
    }
    Some(base)
}

/// Where the number of the layer is in a name, and the number: 3 for `model.layers.3.mlp.act`.
pub fn layer(name: &str) -> Option<(std::ops::Range<usize>, u64)> {
    let mut start = 0;
    let mut parts = name.split('.').peekable();
    while let Some(part) = parts.next() {
        let is_number = !part.is_empty() && part.bytes().all(|it| it.is_ascii_digit());
        // What is written otherwise, `007`, would not come back.
        let plain = is_number && (part.len() == 1 || !part.starts_with('0'));
        if plain && parts.peek().is_some() {
            return Some((start..start + part.len(), part.parse().ok()?));
        }
        start += part.len() + 1;
    }
    None
}

/// A name for one layer.
pub(super) fn at_layer(name: &str, layer: u64) -> Name {
    let Some((before, rest)) = name.split_once("{i") else { return name.to_string() };
    let Some((offset, after)) = rest.split_once('}') else { return name.to_string() };
    let offset: i64 = if offset.is_empty() { 0 } else { offset.parse().unwrap_or(0) };
    format!("{before}{}{after}", layer.saturating_add_signed(offset))
}

impl<T: Named + Clone> Folded<T> {
    /// Each for itself.
    pub fn unfolded(self) -> Vec<T> {
        if self.layers.is_empty() {
            return vec![self.it];
        }
        let one = |&layer: &u64| {
            let mut res = self.it.clone();
            res.names().into_iter().for_each(|it| *it = at_layer(it, layer));
            res
        };
        self.layers.iter().map(one).collect()
    }
}

/// `0..2,5`: inclusive, as layers are spoken of.
pub(super) fn ranges_text(layers: &[u64]) -> String {
    let text = |(first, last): (u64, u64)| match first == last {
        true => first.to_string(),
        false => format!("{first}..{last}"),
    };
    runs(layers).map(text).collect::<Vec<String>>().join(",")
}

/// The first and last of numbers that follow one another: `0, 1, 2, 5` are `(0, 2)` and `(5, 5)`.
pub fn runs(numbers: &[u64]) -> impl Iterator<Item = (u64, u64)> {
    let runs = numbers.chunk_by(|a, b| a.checked_add(1) == Some(*b));
    runs.filter_map(|it| Some((*it.first()?, *it.last()?)))
}

mod ranges {
    //! Layers as text.

    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    use super::Layers;

    /// More layers than any model has: a file cannot make a reader unfold without end.
    const MAX: u64 = 1 << 16;

    pub fn serialize<S: Serializer>(layers: &Layers, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&super::ranges_text(layers))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Layers, D::Error> {
        let text = String::deserialize(deserializer)?;
        let mut res = Layers::new();
        for part in text.split(',') {
            let (first, last) = part.split_once("..").unwrap_or((part, part));
            let number = |it: &str| it.parse::<u64>().ok().filter(|&it| it < MAX);
            match (number(first), number(last)) {
                (Some(first), Some(last)) => res.extend(first..=last),
                _ => return Err(D::Error::custom(format!("`{text}` names no layers"))),
            }
        }
        Ok(res)
    }
}
