//! A plan by name, and which tensors of two plans are the same.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};

use rustc_hash::{FxHashMap, FxHashSet};

use crate::graph::Name;
use crate::meaning::{Call, Does, Meaning, Named, Tensor};
use crate::plan::Role;

/// A plan, by name.
pub(super) struct Side<'a> {
    pub(super) meaning: &'a Meaning,
    pub(super) tensors: FxHashMap<&'a str, &'a Tensor>,
    /// Calls that write a tensor, and which of their results it is.
    pub(super) makers: FxHashMap<&'a str, Vec<(&'a Call, usize)>>,
    /// What a tensor holds, as a number: alike for what is computed alike.
    pub(super) values: FxHashMap<&'a str, u64>,
}

impl<'a> Side<'a> {
    pub(super) fn of(meaning: &'a Meaning) -> Side<'a> {
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
    pub(super) fn is_leaf(&self, name: &str) -> bool {
        self.tensors.get(name).is_none_or(|it| match it.role {
            Role::Param | Role::State | Role::Input => true,
            Role::Carried | Role::Temp => false,
        })
    }

    pub(super) fn makers(&self, name: &str) -> &[(&'a Call, usize)] {
        self.makers.get(name).map_or(&[], |it| &it[..])
    }

    /// What a call reads to make one of its results.
    pub(super) fn args(call: &'a Call, result: usize) -> &'a [Name] {
        match call.does {
            Does::Op(_) => &call.args,
            Does::Move { .. } | Does::Reduce { .. } => {
                call.args.get(result..=result).unwrap_or_default()
            }
        }
    }

    /// Which of them a call reads as written anew.
    pub(super) fn rewritten(call: &Call, result: usize) -> String {
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
    pub(super) fn origin(&self, name: &'a str) -> &'a str {
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
    pub(super) fn renames(&self, new: &Side<'_>) -> FxHashMap<Name, Name> {
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
    pub(super) fn renamed(&self, names: &FxHashMap<Name, Name>) -> Meaning {
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
