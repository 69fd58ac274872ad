//! Where what is computed differs first, and where a value is rounded once more or less.

use super::side::Side;
use super::text::Text;
use super::{Area, Cx};
use crate::meaning::{Call, Does};

impl<'a> Cx<'a> {
    /// Where what is computed differs first.
    pub(super) fn numerics(&mut self) {
        let (old, new) = (self.old, self.new);
        for name in self.names() {
            if !(old.tensors.contains_key(name) && new.tensors.contains_key(name)) {
                continue;
            }
            // What only came here another way is compared where it comes from.
            let origins = (old.origin(name), new.origin(name));
            if origins.0 == origins.1 && origins.0 != name {
                continue;
            }
            if is_told_with_first(old.makers(origins.0), new.makers(origins.1)) {
                continue;
            }
            let (a, b) = (Made::of(old, origins.0), Made::of(new, origins.1));
            if a.len() == b.len() && a.iter().zip(&b).all(|(a, b)| self.is_alike(a, b)) {
                continue;
            }
            if a.len() == b.len() && a.iter().zip(&b).all(|(a, b)| self.reads_alike(a, b)) {
                self.words(Area::Numerics, "made by", name, Made::words(&a), Made::words(&b));
                continue;
            }
            let (from, to) = (Made::text(&a), Made::text(&b));
            self.note(Area::Numerics, "made by", name, Some(from), Some(to));
            // The same op has taken in nothing.
            if Made::words(&a) != Made::words(&b) {
                self.rounding(name, &a, &b);
            }
        }
    }

    fn is_alike(&self, a: &Made<'a>, b: &Made<'a>) -> bool {
        a.what == b.what && self.reads_alike(a, b)
    }

    fn reads_alike(&self, a: &Made<'a>, b: &Made<'a>) -> bool {
        a.args.len() == b.args.len() && a.args.iter().zip(&b.args).all(|(a, b)| self.is_same(a, b))
    }

    /// Whether a tensor of the first and one of the second are meant to be the same.
    fn is_same(&self, a: &str, b: &str) -> bool {
        a == b || self.old.values.get(a) == self.new.values.get(b)
    }

    /// A value that is no longer rounded on its own, because an op took in what made it, or the other way
    /// round.
    fn rounding(&mut self, name: &str, a: &[Made<'a>], b: &[Made<'a>]) {
        let (old, new) = (self.old, self.new);
        let read =
            |made: &[Made<'a>]| made.iter().flat_map(|it| it.args.clone()).collect::<Vec<_>>();
        let (reads_a, reads_b) = (read(a), read(b));
        // What an op made, only this plan keeps, and the other has the operands of in its place.
        let own =
            |side: &Side<'a>, reads: &[&'a str], other: &Side<'a>, same: &dyn Fn(&str) -> bool| {
                let taken_in = |it: &&&str| {
                    let by_op =
                        side.makers(it).iter().filter(|it| matches!(it.0.does, Does::Op(_)));
                    by_op.flat_map(|it| &it.0.args).any(|it| same(side.origin(it)))
                };
                let only = reads.iter().filter(|it| !other.tensors.contains_key(**it));
                only.filter(taken_in).copied().collect::<Vec<&'a str>>()
            };
        let before = own(old, &reads_a, new, &|it| reads_b.iter().any(|b| self.is_same(it, b)));
        let after = own(new, &reads_b, old, &|it| reads_a.iter().any(|a| self.is_same(a, it)));
        let text = |all: &[&str], side: &Side<'a>| match all {
            [] => Text::words("once"),
            [first, ..] => {
                let dtype = side.tensors[first].dtype;
                let words = format!("twice, in {dtype} first");
                Text::words(words).then(" as ").names(all.iter().copied(), "")
            }
        };
        if before.is_empty() != after.is_empty() {
            let (from, to) = (text(&before, old), text(&after, new));
            self.note(Area::Numerics, "rounded", name, Some(from), Some(to));
        }
    }
}

/// Whether these are further results of calls of which the first result is the same in both plans: what
/// changes is said of that.
fn is_told_with_first(old: &[(&Call, usize)], new: &[(&Call, usize)]) -> bool {
    let first = |it: &(&Call, usize)| it.0.results.first().cloned();
    let further = old.iter().zip(new).all(|(a, b)| a.1 > 0 && a.1 == b.1 && first(a) == first(b));
    further && !old.is_empty() && old.len() == new.len()
}

/// How numbers came about, wherever they are.
#[derive(Debug, PartialEq)]
struct Made<'a> {
    what: String,
    args: Vec<&'a str>,
}

impl<'a> Made<'a> {
    fn of(side: &Side<'a>, name: &'a str) -> Vec<Made<'a>> {
        let one = |&(call, i): &(&'a Call, usize)| {
            let which = if i > 0 { format!(" (result {})", i + 1) } else { String::new() };
            let what = match &call.does {
                Does::Op(op) => format!("{op}{which}"),
                Does::Move { .. } => "a copy".to_string(),
                Does::Reduce { how: _, with, over, dtype } => {
                    format!("{with} over {over} in {dtype}")
                }
            };
            let what = what + &Side::rewritten(call, i);
            let args = Side::args(call, i).iter().map(|it| side.origin(it)).collect();
            Made { what, args }
        };
        side.makers(name).iter().map(one).collect()
    }

    fn words(all: &[Made<'a>]) -> String {
        let all: Vec<&str> = all.iter().map(|it| it.what.as_str()).collect();
        if all.is_empty() { "nothing".to_string() } else { all.join("; ") }
    }

    fn text(all: &[Made<'a>]) -> Text {
        let mut res = Text::words(Made::words(all));
        for (i, it) in all.iter().enumerate() {
            let before = if i == 0 { " of " } else { "; " };
            res = res.then(before).names(it.args.iter().copied(), "nothing");
        }
        res
    }
}
