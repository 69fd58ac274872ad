//! What moves between ranks, how much of it, when it starts and who waits for it.

use std::collections::{BTreeMap, BTreeSet};

use rustc_hash::FxHashMap;

use super::side::Side;
use super::text::Text;
use super::{Area, Cx, Total, TotalChange};
use crate::meaning::order::Order;
use crate::meaning::{Call, Does, Meaning};
use crate::plan::PlanSection;

impl<'a> Cx<'a> {
    pub(super) fn moves(&mut self) {
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

    /// Notes that a collective has another place among what is computed.
    fn note_place(&mut self, what: &'static str, name: &str, from: Text, to: Text) {
        let to = if from == to { to.then(", with other instructions ahead of it") } else { to };
        self.note(Area::Schedule, what, name, Some(from), Some(to));
    }

    pub(super) fn schedule(&mut self) {
        let (old, new) = (self.old, self.new);
        let first = Order::of(old.meaning, |it| new.tensors.contains_key(it));
        let second = Order::of(new.meaning, |it| old.tensors.contains_key(it));
        let (mut ahead_old, mut ahead_new) = (Ahead::default(), Ahead::default());
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
            let behind = |ahead: &mut Ahead<'a>, [side, other]: [&Side<'a>; 2], call: &'a Call| {
                let behind = ahead.sent_by_both(side, other, call.behind.as_deref());
                Some(Text::default().names(behind, "nothing"))
            };
            let from = behind(&mut ahead_old, [old, new], a);
            let to = behind(&mut ahead_new, [new, old], b);
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

/// Caches, for tensors that only this plan sends, the nearest one ahead of it on its stream that both plans send.
#[derive(Default)]
struct Ahead<'a>(FxHashMap<&'a str, Option<&'a str>>);

impl<'a> Ahead<'a> {
    /// `behind`, or the first ahead of it that both plans send: a tensor that only one plan sends does not change the
    /// order of the others.
    fn sent_by_both(
        &mut self,
        side: &Side<'a>,
        other: &Side<'a>,
        behind: Option<&'a str>,
    ) -> Option<&'a str> {
        let mut passed = Vec::new();
        let mut at = behind;
        while let Some(name) = at.filter(|it| !is_sent(other, it)) {
            if let Some(known) = self.0.get(name) {
                at = *known;
                break;
            }
            // A file by hand may have a circle, which ends here.
            self.0.insert(name, None);
            passed.push(name);
            let maker = side.makers(name).iter().find(|it| it.0.bytes.is_some());
            at = maker.and_then(|it| it.0.behind.as_deref());
        }
        passed.into_iter().for_each(|it| _ = self.0.insert(it, at));
        at
    }
}

/// Whether a plan moves something into this tensor.
fn is_sent(side: &Side<'_>, name: &str) -> bool {
    side.makers(name).iter().any(|it| it.0.bytes.is_some())
}

/// Collectives of a step, by axes and kind; none if they are the same.
pub(super) fn totals(a: &Meaning, b: &Meaning) -> Vec<TotalChange> {
    let of = |meaning: &Meaning| {
        let mut res: BTreeMap<(String, String), Total> = BTreeMap::new();
        let has = |section| meaning.calls.iter().any(|it| it.section == section);
        let runs = PlanSection::ALL.map(|it| it.runs(meaning.program.micro_batches, has));
        for call in &meaning.calls {
            let times = u64::from(runs[call.section as usize]);
            if times == 0 {
                continue;
            }
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
