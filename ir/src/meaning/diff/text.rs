//! Changes of single tensors, and how those that say the same become one [`Change`].

use std::collections::BTreeSet;

use indexmap::IndexMap;
use rustc_hash::{FxBuildHasher, FxHashMap};

use super::{Area, Change, Subject};
use crate::graph::Name;
use crate::meaning::fold::{Folded, Named, fold, ranges_text};

/// Words, and then the names that they are about, so that layers can be folded.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(super) struct Text {
    pub(super) words: String,
    pub(super) names: Vec<Piece>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Piece {
    Words(&'static str),
    Name(Name),
}

/// A change of one tensor.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Raw {
    pub(super) area: Area,
    pub(super) what: &'static str,
    pub(super) name: Name,
    pub(super) from: Option<Text>,
    pub(super) to: Option<Text>,
}

/// What is before and after.
type Sides = (Option<String>, Option<String>);

impl Named for Raw {
    fn names(&mut self) -> Vec<&mut Name> {
        let texts = self.from.iter_mut().chain(&mut self.to).flat_map(|it| &mut it.names);
        let named = texts.filter_map(|it| match it {
            Piece::Words(_) => None,
            Piece::Name(name) => Some(name),
        });
        std::iter::once(&mut self.name).chain(named).collect()
    }
}

impl Text {
    pub(super) fn words(it: impl ToString) -> Text {
        Text { words: it.to_string(), names: Vec::new() }
    }

    /// `a, b`; or what stands for nothing.
    pub(super) fn names<'a>(
        mut self,
        names: impl IntoIterator<Item = &'a str>,
        none: &'static str,
    ) -> Text {
        let before = self.names.len();
        for name in names {
            if self.names.len() > before {
                self.names.push(Piece::Words(", "));
            }
            self.names.push(Piece::Name(name.to_string()));
        }
        if self.names.len() == before {
            self.names.push(Piece::Words(none));
        }
        self
    }

    pub(super) fn then(mut self, words: &'static str) -> Text {
        self.names.push(Piece::Words(words));
        self
    }

    pub(super) fn text(&self) -> String {
        let names = self.names.iter().map(|it| match it {
            Piece::Words(text) => *text,
            Piece::Name(text) => text.as_str(),
        });
        std::iter::once(self.words.as_str()).chain(names).collect()
    }
}

/// Changes that say the same, together; by area. Where several differ in names only, names are left out.
pub(super) fn grouped(raw: Vec<Raw>) -> Vec<Change> {
    let folded: Vec<Folded<Raw>> = fold(&raw)
        .into_iter()
        .flat_map(|it| match it.layers[..] {
            // What is in one layer only is told of as it is.
            [_] => it.unfolded().into_iter().map(|it| Folded { it, layers: vec![] }).collect(),
            _ => vec![it],
        })
        .collect();
    let sides = |it: &Raw, text: fn(&Text) -> String| -> Sides {
        (it.from.as_ref().map(text), it.to.as_ref().map(text))
    };
    let full = |it: &Raw| sides(it, Text::text);
    let words = |it: &Raw| sides(it, |it| it.words.clone());
    let mut alike: FxHashMap<(Area, &str, Sides), BTreeSet<Sides>> = FxHashMap::default();
    for Folded { it, .. } in &folded {
        alike.entry((it.area, it.what, words(it))).or_default().insert(full(it));
    }
    let mut res: IndexMap<(Area, &str, Sides), Vec<Subject>, FxBuildHasher> = IndexMap::default();
    for Folded { it, layers } in &folded {
        let key = (it.area, it.what, words(it));
        // Words alone say what happens where they differ.
        let says = key.2.0 != key.2.1;
        let sides = if says && alike[&key].len() > 1 { key.2 } else { full(it) };
        let of = res.entry((it.area, it.what, sides)).or_default();
        if !it.name.is_empty() {
            of.push(Subject::of(&it.name, layers));
        }
    }
    // Changes of one property stay together, in the order in which these came up.
    let order: Vec<(Area, &str)> = res.keys().map(|it| (it.0, it.1)).collect();
    let first = |it: &Change| order.iter().position(|known| *known == (it.area, it.what));
    let change = |((area, what, (from, to)), of)| Change { area, what, of, from, to };
    let mut res: Vec<Change> = res.into_iter().map(change).collect();
    res.sort_by_cached_key(|it| (it.area, first(it)));
    res
}

impl Subject {
    fn of(name: &str, layers: &[u64]) -> Subject {
        let text = match layers {
            [] => name.to_string(),
            all => name.replacen("{i}", &format!("{{{}}}", ranges_text(all)), 1),
        };
        Subject { name: text, count: layers.len().max(1) }
    }
}
