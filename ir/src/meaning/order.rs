//! Where, among what the compute stream runs, collectives start and are waited for.
//!
//! A place is what has been run before it, not what happens to be next to it: instructions that go the other
//! way round and do not touch what is between them change no place. What only one of two plans runs is not
//! counted.

use std::hash::{DefaultHasher, Hash, Hasher};

use rustc_hash::FxHashMap;

use super::{Call, Meaning};
use crate::plan::PlanSection;

/// A set of instructions, as a sum of numbers for them.
pub type Place = u64;

/// Instructions of the compute stream, in order.
pub struct Order<'a> {
    calls: FxHashMap<(PlanSection, &'a str), &'a Call>,
    /// By what an instruction makes first: its number in its section, from 0.
    at: FxHashMap<(PlanSection, &'a str), usize>,
    /// By section and number: what has been run before.
    places: FxHashMap<PlanSection, Vec<Place>>,
    /// For each collective, by its first result: the number of compute instructions that it, or a collective ahead
    /// of it on its stream, waits for.
    after: FxHashMap<(PlanSection, &'a str), usize>,
}

impl<'a> Order<'a> {
    /// Of a plan, without what `counts` says no to.
    pub fn of(meaning: &'a Meaning, counts: impl Fn(&str) -> bool) -> Order<'a> {
        let mut next: FxHashMap<(PlanSection, Option<&str>), Vec<&Call>> = FxHashMap::default();
        for call in &meaning.calls {
            next.entry((call.section, call.behind.as_deref())).or_default().push(call);
        }
        let first = |it: &'a Call| it.results.first().map(|name| ((it.section, name.as_str()), it));
        let mut res = Order {
            calls: meaning.calls.iter().filter(|it| it.bytes.is_some()).filter_map(first).collect(),
            at: FxHashMap::default(),
            places: FxHashMap::default(),
            after: FxHashMap::default(),
        };
        for section in PlanSection::ALL {
            let mut behind = None;
            let mut places: Vec<Place> = vec![0];
            // Streams for communication have nothing that stays on its rank.
            while let Some(call) =
                next.get(&(section, behind)).and_then(|it| it.iter().find(|it| it.bytes.is_none()))
            {
                let Some(name) = call.results.first().map(String::as_str) else { break };
                if res.at.insert((section, name), places.len() - 1).is_some() {
                    break;
                }
                let mut hash = DefaultHasher::new();
                name.hash(&mut hash);
                let own = if counts(name) { hash.finish() } else { 0 };
                places.push(places[places.len() - 1].wrapping_add(own));
                behind = Some(name);
            }
            res.places.insert(section, places);
        }
        for call in meaning.calls.iter().filter(|it| it.bytes.is_some()) {
            res.follow(call);
        }
        res
    }

    /// Fills in `after` of a collective and of those ahead of it, each of them once.
    fn follow(&mut self, call: &'a Call) {
        let mut ahead = Vec::new();
        let mut at = call.results.first().map(|it| (call.section, it.as_str()));
        let mut after = 0;
        while let Some((key, call)) = at.and_then(|it| Some((it, *self.calls.get(&it)?))) {
            if let Some(known) = self.after.get(&key) {
                after = *known;
                break;
            }
            // A file by hand may have a circle, which ends here.
            self.after.insert(key, 0);
            ahead.push((key, self.waits_for(call)));
            at = call.behind.as_deref().map(|it| (call.section, it));
        }
        for (key, own) in ahead.into_iter().rev() {
            after = after.max(own);
            self.after.insert(key, after);
        }
    }

    /// Returns the number of compute instructions that a collective itself waits for.
    fn waits_for(&self, call: &Call) -> usize {
        let waited = call.after.iter().filter_map(|it| self.at.get(&(call.section, it.as_str())));
        waited.map(|it| it + 1).max().unwrap_or(0)
    }

    /// The place at which a collective starts, after everything that it and those ahead of it on its stream wait for.
    pub fn start(&self, call: &'a Call) -> Place {
        let behind = call.behind.as_deref();
        let ahead = behind.and_then(|it| self.after.get(&(call.section, it)));
        let after = self.waits_for(call).max(ahead.copied().unwrap_or(0));
        self.places[&call.section].get(after).copied().unwrap_or(0)
    }

    /// Where a collective is waited for; `None` if nothing waits in its section.
    pub fn wait(&self, call: &Call) -> Option<Place> {
        let at = *self.at.get(&(call.section, call.before.as_deref()?))?;
        self.places[&call.section].get(at).copied()
    }

    /// What else than the compute stream a collective waits for.
    pub fn others(&self, call: &'a Call) -> Vec<&'a str> {
        let after = call.after.iter().map(String::as_str);
        after.filter(|it| !self.at.contains_key(&(call.section, *it))).collect()
    }
}
