//! [`diff`]: what two plans do differently.
//!
//! Values of the two are first told to be the same: those that are computed alike, whatever they are called;
//! of the rest, those with one name; then those that are computed alike from such. What is reported is where
//! a difference arises and not what follows from it: a tensor whose op and operands are the same is not
//! named for the sake of an operand of an operand. Movements between ranks are looked through when numbers
//! are compared, and are compared by themselves.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};

use indexmap::IndexMap;
use rustc_hash::{FxBuildHasher, FxHashMap, FxHashSet};
use serde::Serialize;

use super::fold::{Folded, fold, ranges_text};
use super::order::Order;
use super::{Call, Does, Held, Meaning, Named, Tensor};
use crate::graph::Name;
use crate::plan::{PlanSection, Role};

/// What two plans do differently.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Diff {
    /// Collectives by axes and kind, all of them, if the number or bytes of some differ.
    pub totals: Vec<TotalChange>,
    /// All else, by area.
    pub changes: Vec<Change>,
}

impl Diff {
    /// Whether the plans mean the same.
    pub fn is_empty(&self) -> bool {
        self.totals.is_empty() && self.changes.is_empty()
    }
}

/// What a change is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Area {
    /// Mesh, data, sizes, the learning rate.
    Model,
    /// Where tensors live, and which there are.
    Placement,
    /// What is computed: ops, types, constants, reductions.
    Numerics,
    /// What moves between ranks.
    Collectives,
    /// Bytes, and what is there at the peak.
    Memory,
    /// When collectives start and who waits for them.
    Schedule,
}

/// One change, with all that it holds for.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Change {
    /// What it is about.
    pub area: Area,
    /// Which property changes: `sharding`, `dtype`, `starts after`, ...
    pub what: &'static str,
    /// Of what; empty for the plan as a whole.
    pub of: Vec<Subject>,
    /// In the first plan; absent if the first has no such thing.
    pub from: Option<String>,
    /// In the second plan.
    pub to: Option<String>,
}

/// Tensors of the same name in some layers.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Subject {
    /// `model.layers.{0..31}.mlp.act`.
    pub name: String,
    /// How many they are.
    pub count: usize,
}

/// Calls of one kind over one set of axes, in both plans.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TotalChange {
    /// The user's axes.
    pub over: String,
    /// `all_gather`, ...
    pub kind: String,
    /// In the first plan.
    pub from: Total,
    /// In the second plan.
    pub to: Total,
}

/// Calls, bytes and bytes sent of one rank and one step; see [`CollectiveTotal`](crate::summary::CollectiveTotal).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Total {
    /// Calls.
    pub count: u64,
    /// Bytes.
    pub bytes: u64,
    /// Bytes that a rank sends in a ring.
    pub wire_bytes: u64,
}

/// Words, and then the names that they are about, so that layers can be folded.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
struct Text {
    words: String,
    names: Vec<Piece>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Piece {
    Words(&'static str),
    Name(Name),
}

/// A change of one tensor.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Raw {
    area: Area,
    what: &'static str,
    name: Name,
    from: Option<Text>,
    to: Option<Text>,
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

impl Text {
    fn words(it: impl ToString) -> Text {
        Text { words: it.to_string(), names: Vec::new() }
    }

    /// `a, b`; or what stands for nothing.
    fn names<'a>(mut self, names: impl IntoIterator<Item = &'a str>, none: &'static str) -> Text {
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

    fn then(mut self, words: &'static str) -> Text {
        self.names.push(Piece::Words(words));
        self
    }

    fn text(&self) -> String {
        let names = self.names.iter().map(|it| match it {
            Piece::Words(text) => *text,
            Piece::Name(text) => text.as_str(),
        });
        std::iter::once(self.words.as_str()).chain(names).collect()
    }
}

/// What two plans do differently.
pub fn diff(a: &Meaning, b: &Meaning) -> Diff {
    let old = Side::of(a);
    let renamed = old.renames(&Side::of(b));
    let b = &b.renamed(&renamed);
    let new = Side::of(b);
    let mut cx = Cx { old: &old, new: &new, raw: Vec::new() };
    cx.model(a, b);
    cx.tensors();
    cx.numerics();
    cx.moves();
    let totals = totals(a, b);
    cx.memory(a, b);
    cx.schedule();
    Diff { totals, changes: grouped(cx.raw) }
}

/// A plan, by name.
struct Side<'a> {
    meaning: &'a Meaning,
    tensors: FxHashMap<&'a str, &'a Tensor>,
    /// Calls that write a tensor, and which of their results it is.
    makers: FxHashMap<&'a str, Vec<(&'a Call, usize)>>,
    /// What a tensor holds, as a number: alike for what is computed alike.
    values: FxHashMap<&'a str, u64>,
}

impl<'a> Side<'a> {
    fn of(meaning: &'a Meaning) -> Side<'a> {
        let tensors = meaning.tensors.iter().map(|it| (it.name.as_str(), it)).collect();
        let mut makers: FxHashMap<&str, Vec<(&Call, usize)>> = FxHashMap::default();
        for call in &meaning.calls {
            for (i, result) in call.results.iter().enumerate() {
                makers.entry(result).or_default().push((call, i));
            }
        }
        let mut res = Side { meaning, tensors, makers, values: FxHashMap::default() };
        res.number();
        res
    }

    /// Whether a name is the user's, who finds the tensor by it: it is then what it is called.
    fn is_leaf(&self, name: &str) -> bool {
        self.tensors.get(name).is_none_or(|it| match it.role {
            Role::Param | Role::State | Role::Input => true,
            Role::Carried | Role::Temp => false,
        })
    }

    fn makers(&self, name: &str) -> &[(&'a Call, usize)] {
        self.makers.get(name).map_or(&[], |it| &it[..])
    }

    /// What a call reads to make one of its results.
    fn args(call: &'a Call, result: usize) -> &'a [Name] {
        match call.does {
            Does::Op(_) => &call.args,
            Does::Move { .. } | Does::Reduce { .. } => {
                call.args.get(result..=result).unwrap_or_default()
            }
        }
    }

    /// Which of them a call reads as written anew.
    fn rewritten(call: &Call, result: usize) -> String {
        call.rewritten_text(match call.does {
            Does::Op(_) => 0..call.args.len(),
            Does::Move { .. } | Does::Reduce { .. } => result..result + 1,
        })
    }

    /// Whether a tensor made so has the numbers of another, as that was first.
    fn only_moves(makers: &[(&Call, usize)]) -> bool {
        match makers {
            [(call, i)] => {
                matches!(call.does, Does::Move { .. }) && Side::rewritten(call, *i).is_empty()
            }
            _ => false,
        }
    }

    /// Numbers all values, operands first.
    fn number(&mut self) {
        let mut open: FxHashSet<&str> = FxHashSet::default();
        for tensor in &self.meaning.tensors {
            let mut stack = vec![(tensor.name.as_str(), false)];
            while let Some((name, ready)) = stack.pop() {
                if self.values.contains_key(name) {
                    continue;
                }
                if ready || self.is_leaf(name) {
                    self.values.insert(name, self.value(name));
                } else if open.insert(name) {
                    stack.push((name, true));
                    let makers = self.makers(name).iter();
                    let args = makers.flat_map(|&(call, i)| Side::args(call, i));
                    // What is accumulated in place reads itself.
                    stack.extend(
                        args.filter(|it| !open.contains(it.as_str()))
                            .map(|it| (it.as_str(), false)),
                    );
                }
            }
        }
    }

    fn value(&self, name: &str) -> u64 {
        let mut hash = DefaultHasher::new();
        if self.is_leaf(name) {
            name.hash(&mut hash);
            return hash.finish();
        }
        let dtype = self.tensors[name].dtype;
        let own = |arg: &Name| self.values.get(arg.as_str()).copied();
        let makers = self.makers(name);
        for &(call, i) in makers {
            let args: Vec<Option<u64>> = Side::args(call, i).iter().map(own).collect();
            match &call.does {
                Does::Move { .. } if Side::only_moves(makers) => {
                    return args.first().copied().flatten().unwrap_or(0);
                }
                Does::Move { .. } => args.hash(&mut hash),
                Does::Op(op) => (op, i, args, dtype).hash(&mut hash),
                Does::Reduce { how: _, with, over, dtype } => {
                    (with, over, dtype, args).hash(&mut hash);
                }
            }
            Side::rewritten(call, i).hash(&mut hash);
        }
        hash.finish()
    }

    /// The tensor whose numbers these are, on other ranks or in another buffer.
    fn origin(&self, name: &'a str) -> &'a str {
        let mut name = name;
        // A plan that is broken may move in circles.
        for _ in 0..self.meaning.tensors.len() {
            match self.makers(name) {
                makers @ [(call, i)] if Side::only_moves(makers) && !self.is_leaf(name) => {
                    match Side::args(call, *i).first() {
                        Some(arg) => name = arg,
                        None => break,
                    }
                }
                _ => break,
            }
        }
        name
    }

    /// What a tensor is to whom looks for it without its name: its value, how it came here, where it lives.
    fn likeness(&self, name: &str) -> u64 {
        let tensor = self.tensors[name];
        let mut hash = DefaultHasher::new();
        (self.values[name], &tensor.sharding, tensor.dtype, &tensor.shape, tensor.role)
            .hash(&mut hash);
        for (call, _) in self.makers(name) {
            (call.section, &call.does).hash(&mut hash);
        }
        hash.finish()
    }

    /// For tensors of `new` that have another name here, that name.
    fn renames(&self, new: &Side<'_>) -> FxHashMap<Name, Name> {
        let alike = |side: &Side<'_>| {
            let mut res: BTreeMap<u64, BTreeSet<Name>> = BTreeMap::new();
            for tensor in &side.meaning.tensors {
                if !side.is_leaf(&tensor.name) {
                    let likeness = side.likeness(&tensor.name);
                    res.entry(likeness).or_default().insert(tensor.name.clone());
                }
            }
            res
        };
        let old = alike(self);
        // By name here, the name there: what is certain.
        let mut pairs: BTreeMap<Name, Name> = BTreeMap::new();
        let mut found: FxHashSet<Name> = FxHashSet::default();
        for (likeness, names) in alike(new) {
            let Some(theirs) = old.get(&likeness) else { continue };
            let same = names.intersection(theirs).map(|it| (it, it));
            let others = theirs.difference(&names).zip(names.difference(theirs));
            for (here, there) in same.chain(others) {
                pairs.insert(here.clone(), there.clone());
                found.insert(there.clone());
            }
        }
        // One name, though another value: both are free.
        for tensor in &new.meaning.tensors {
            let name = &tensor.name;
            let free = !found.contains(name) && !pairs.contains_key(name);
            if free && self.tensors.contains_key(name.as_str()) {
                pairs.insert(name.clone(), name.clone());
                found.insert(name.clone());
            }
        }
        let mut res: FxHashMap<Name, Name> =
            pairs.iter().map(|(here, there)| (there.clone(), here.clone())).collect();
        self.follow(new, &mut res);
        // What only the second has keeps its name, unless that means something else here.
        let taken: FxHashSet<Name> = res.values().cloned().collect();
        for tensor in &new.meaning.tensors {
            if !res.contains_key(&tensor.name) && taken.contains(&tensor.name) {
                res.insert(tensor.name.clone(), format!("{}'", tensor.name));
            }
        }
        res.retain(|from, to| from != to);
        res
    }

    /// Pairs what is made alike from what is paired.
    fn follow(&self, new: &Side<'_>, known: &mut FxHashMap<Name, Name>) {
        let taken: FxHashSet<Name> = known.values().cloned().collect();
        let mut free: FxHashMap<(String, Vec<Name>), Vec<&str>> = FxHashMap::default();
        for tensor in self.meaning.tensors.iter().rev() {
            if !taken.contains(&tensor.name) {
                let key = self.signature(&tensor.name, &FxHashMap::default());
                free.entry(key).or_default().push(&tensor.name);
            }
        }
        loop {
            let before = known.len();
            for tensor in &new.meaning.tensors {
                if known.contains_key(&tensor.name) || free.is_empty() {
                    continue;
                }
                let key = new.signature(&tensor.name, known);
                if let Some(name) = free.get_mut(&key).and_then(Vec::pop) {
                    known.insert(tensor.name.clone(), name.to_string());
                }
            }
            if known.len() == before {
                return;
            }
        }
    }

    /// How a tensor is made, where it lives, and from what.
    fn signature(&self, name: &str, renamed: &FxHashMap<Name, Name>) -> (String, Vec<Name>) {
        let it = self.tensors[name];
        let mut how = format!("{} {} {:?} {}", it.role.name(), it.dtype, it.shape, it.sharding);
        let mut args = Vec::new();
        for &(call, i) in self.makers(name) {
            let rewritten = Side::rewritten(call, i);
            how.push_str(&format!(" {} {i} {}{rewritten}", call.section.name(), call.does.text()));
            args.extend(Side::args(call, i).iter().map(|it| renamed.get(it).unwrap_or(it).clone()));
        }
        (how, args)
    }
}

impl Meaning {
    /// The same with other names.
    fn renamed(&self, names: &FxHashMap<Name, Name>) -> Meaning {
        let rename = |it: &mut Name| {
            if let Some(name) = names.get(it) {
                it.clone_from(name);
            }
        };
        let mut res = self.clone();
        res.tensors.iter_mut().for_each(|it| rename(&mut it.name));
        res.calls.iter_mut().for_each(|it| it.names().into_iter().for_each(rename));
        res.held.iter_mut().for_each(|it| rename(&mut it.name));
        res.program.results.iter_mut().for_each(|it| rename(&mut it.1));
        res.program.peak.iter_mut().for_each(|it| rename(&mut it.2));
        res
    }
}

struct Cx<'a> {
    old: &'a Side<'a>,
    new: &'a Side<'a>,
    raw: Vec<Raw>,
}

impl<'a> Cx<'a> {
    /// Notes a change, if there is one.
    fn note(
        &mut self,
        area: Area,
        what: &'static str,
        name: &str,
        from: Option<Text>,
        to: Option<Text>,
    ) {
        if from != to {
            self.raw.push(Raw { area, what, name: name.to_string(), from, to });
        }
    }

    fn words(
        &mut self,
        area: Area,
        what: &'static str,
        name: &str,
        from: impl ToString,
        to: impl ToString,
    ) {
        self.note(area, what, name, Some(Text::words(from)), Some(Text::words(to)));
    }

    /// Names that both have, and those that one has, in the order of the first and then of the second.
    fn names(&self) -> Vec<&'a str> {
        let (old, new) = (self.old, self.new);
        let first = old.meaning.tensors.iter().map(|it| it.name.as_str());
        let second = new.meaning.tensors.iter().map(|it| it.name.as_str());
        first.chain(second.filter(|it| !old.tensors.contains_key(it))).collect()
    }

    fn model(&mut self, a: &Meaning, b: &Meaning) {
        let (a, b) = (&a.program, &b.program);
        let mesh = |it: &[(Name, u32)]| {
            it.iter().map(|it| format!("{}={}", it.0, it.1)).collect::<Vec<_>>().join(" x ")
        };
        self.words(Area::Model, "model", "", &a.name, &b.name);
        self.words(Area::Model, "mesh", "", mesh(&a.mesh), mesh(&b.mesh));
        self.words(Area::Model, "micro_batches", "", a.micro_batches, b.micro_batches);
        let (old, new) = (&a.run, &b.run);
        self.words(Area::Model, "steps", "", old.steps, new.steps);
        self.words(Area::Model, "seed", "", old.seed, new.seed);
        self.words(Area::Model, "global batch", "", old.global_batch, new.global_batch);
        self.words(Area::Model, "sequence", "", old.sequence, new.sequence);
        self.words(Area::Model, "vocabulary", "", old.vocab, new.vocab);
        self.words(Area::Numerics, "ignored label", "", old.ignore_index, new.ignore_index);
        let ron = |it: &crate::run::Schedule| ron::to_string(it).expect("numbers have a text");
        self.words(Area::Numerics, "learning rate", "", ron(&old.schedule), ron(&new.schedule));
        let results = |it: &[(Name, Name)]| {
            let names: Vec<&str> = it.iter().map(|it| it.0.as_str()).collect();
            let tensors = it.iter().map(|it| it.1.as_str());
            Text::words(names.join(", ")).then(" = ").names(tensors, "nothing")
        };
        self.note(Area::Model, "results", "", Some(results(&a.results)), Some(results(&b.results)));
    }

    fn tensors(&mut self) {
        for name in self.names() {
            let pair = (self.old.tensors.get(name).copied(), self.new.tensors.get(name).copied());
            let text = |it: &Tensor| {
                let role = it.role.name();
                Text::words(format!("{role} {}{:?} @ {}", it.dtype, it.shape, it.sharding))
            };
            let (Some(a), Some(b)) = pair else {
                self.note(Area::Placement, "tensor", name, pair.0.map(text), pair.1.map(text));
                continue;
            };
            let shape = |it: &Tensor| format!("{:?}", it.shape);
            let aliases = |it: &Tensor| it.aliases.join(", ");
            self.words(Area::Model, "shape", name, shape(a), shape(b));
            self.words(Area::Model, "init", name, &a.init, &b.init);
            self.words(Area::Model, "aliases", name, aliases(a), aliases(b));
            self.words(Area::Placement, "sharding", name, &a.sharding, &b.sharding);
            self.words(Area::Placement, "role", name, a.role.name(), b.role.name());
            self.words(Area::Numerics, "dtype", name, a.dtype, b.dtype);
        }
    }

    /// Where what is computed differs first.
    fn numerics(&mut self) {
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

    fn moves(&mut self) {
        let moves = |side: &'a Side<'a>, name: &str| -> Option<Text> {
            let moving = |it: &&(&Call, usize)| it.0.bytes.is_some();
            let &(call, i) = side.makers(name).iter().find(moving)?;
            let how = match &call.does {
                Does::Op(_) => return None,
                Does::Move { how, over } | Does::Reduce { how, over, .. } => {
                    format!("{how} over {over}")
                }
            };
            let args = Side::args(call, i).iter().map(String::as_str);
            Some(Text::words(how).then(" of ").names(args, "nothing"))
        };
        for name in self.names() {
            let (from, to) = (moves(self.old, name), moves(self.new, name));
            self.note(Area::Collectives, "moved by", name, from, to);
        }
    }

    fn memory(&mut self, a: &Meaning, b: &Meaning) {
        let total = |it: &Meaning| {
            it.program.persistent_bytes + it.program.step_bytes + it.program.workspace_bytes
        };
        let (old, new) = (&a.program, &b.program);
        self.words(Area::Memory, "total bytes", "", total(a), total(b));
        self.words(Area::Memory, "kept bytes", "", old.persistent_bytes, new.persistent_bytes);
        self.words(Area::Memory, "temporary bytes", "", old.step_bytes, new.step_bytes);
        self.words(Area::Memory, "scratch bytes", "", old.workspace_bytes, new.workspace_bytes);
        let peak = |it: &Meaning| {
            let (section, what, name) = it.program.peak.as_ref()?;
            let words = Text::words(format!("{}: {what}", section.name()));
            Some(words.then(" making ").names([name.as_str()], ""))
        };
        self.note(Area::Memory, "peak at", "", peak(a), peak(b));
        let held = |it: &Meaning| -> FxHashMap<Name, u64> {
            it.held.iter().map(|it| (it.name.clone(), it.bytes)).collect()
        };
        let (first, second) = (held(a), held(b));
        for name in self.names() {
            let text = |it: &FxHashMap<Name, u64>| it.get(name).map(Text::words);
            self.note(Area::Memory, "bytes at the peak", name, text(&first), text(&second));
        }
    }

    /// Notes that a collective has another place among what is computed.
    fn note_place(&mut self, what: &'static str, name: &str, from: Text, to: Text) {
        let to = if from == to { to.then(", with other instructions ahead of it") } else { to };
        self.note(Area::Schedule, what, name, Some(from), Some(to));
    }

    fn schedule(&mut self) {
        let (old, new) = (self.old, self.new);
        let first = Order::of(old.meaning, |it| new.tensors.contains_key(it));
        let second = Order::of(new.meaning, |it| old.tensors.contains_key(it));
        for name in self.names() {
            let queued = |side: &Side<'a>| {
                let mut all = side.makers(name).iter().filter(|it| it.0.bytes.is_some());
                all.next().map(|it| it.0)
            };
            let (Some(a), Some(b)) = (queued(old), queued(new)) else { continue };
            // The parts of one call are said once.
            if a.results.first().map(String::as_str) != Some(name) {
                continue;
            }
            let starts = |it: &Call| {
                let after = it.after.iter().map(String::as_str);
                Text::default().names(after, "nothing")
            };
            if (first.start(a), first.others(a)) != (second.start(b), second.others(b)) {
                self.note_place("starts after", name, starts(a), starts(b));
            }
            let waits = |it: &Call| {
                let before = it.before.as_deref();
                Text::default().names(before, "nothing in its section")
            };
            if first.wait(a) != second.wait(b) {
                self.note_place("waited for by", name, waits(a), waits(b));
            }
            let behind = |side: &Side<'a>, other: &Side<'a>, call: &'a Call| {
                let mut behind = call.behind.as_deref();
                // What only one of the plans sends is no change in the order of all else.
                while let Some(it) = behind.filter(|it| !is_sent(other, it)) {
                    let maker = side.makers(it).iter().find(|it| it.0.bytes.is_some());
                    behind = maker.and_then(|it| it.0.behind.as_deref());
                }
                Some(Text::default().names(behind, "nothing"))
            };
            let (from, to) = (behind(old, new, a), behind(new, old, b));
            self.note(Area::Schedule, "queued behind", name, from, to);
            let together = |it: &'a Call| {
                let others = it.results.iter().map(String::as_str).filter(|it| *it != name);
                let mut others: Vec<&str> = others.collect();
                others.sort_unstable();
                Some(Text::default().names(others, "nothing"))
            };
            self.note(Area::Schedule, "in one call with", name, together(a), together(b));
            let section = |it: &Call| Some(Text::words(it.section.name()));
            self.note(Area::Schedule, "section", name, section(a), section(b));
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

/// Whether a plan moves something into this tensor.
fn is_sent(side: &Side<'_>, name: &str) -> bool {
    side.makers(name).iter().any(|it| it.0.bytes.is_some())
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

/// Collectives of a step, by axes and kind; none if they are the same.
fn totals(a: &Meaning, b: &Meaning) -> Vec<TotalChange> {
    let of = |meaning: &Meaning| {
        let mut res: BTreeMap<(String, String), Total> = BTreeMap::new();
        for call in &meaning.calls {
            let times = match call.section {
                PlanSection::Prepare => continue,
                PlanSection::Step => u64::from(meaning.program.micro_batches),
                PlanSection::Update => 1,
            };
            let (
                Some((bytes, wire_bytes)),
                Does::Move { how, over } | Does::Reduce { how, over, .. },
            ) = (call.bytes, &call.does)
            else {
                continue;
            };
            let total = res.entry((over.clone(), how.clone())).or_default();
            total.count += times;
            total.bytes = total.bytes.saturating_add(times.saturating_mul(bytes));
            total.wire_bytes = total.wire_bytes.saturating_add(times.saturating_mul(wire_bytes));
        }
        res
    };
    let (old, new) = (of(a), of(b));
    if old == new {
        return Vec::new();
    }
    let keys: BTreeSet<&(String, String)> = old.keys().chain(new.keys()).collect();
    let change = |key: &(String, String)| {
        let total = |it: &BTreeMap<_, Total>| it.get(key).copied().unwrap_or_default();
        let (from, to) = (total(&old), total(&new));
        TotalChange { over: key.0.clone(), kind: key.1.clone(), from, to }
    };
    keys.into_iter().map(change).collect()
}

/// Changes that say the same, together; by area. Where several differ in names only, names are left out.
fn grouped(raw: Vec<Raw>) -> Vec<Change> {
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
