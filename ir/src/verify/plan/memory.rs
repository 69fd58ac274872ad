//! `memory`: where buffers are, and that arenas and the peak are as large as the plan states.

use cranelift_entity::SecondaryMap;
use rustc_hash::FxHashSet;

use super::{Cx, Flow};
use crate::plan::{ALIGN, Arena, Buffer, Buffers, PlanSection, Role, memory_profile};
use crate::verify::Property;

const PROPERTY: Property = Property::Memory;

/// Whether every buffer has a place. It must be aligned and inside its arena, and no two that survive a
/// step may overlap.
pub(super) fn places(cx: &mut Cx<'_>, bytes: &SecondaryMap<Buffer, u64>) -> bool {
    let plan = cx.plan;
    let mut valid = true;
    let mut persistent: Vec<(u64, u64, Buffer)> = Vec::new();
    for (buffer, data) in &plan.buffers {
        let Some(offset) = data.offset else {
            valid = false;
            cx.buffer(PROPERTY, buffer, "has no offset".into());
            continue;
        };
        if offset % ALIGN != 0 {
            let message = format!("offset {offset} is not a multiple of {ALIGN}");
            cx.buffer(PROPERTY, buffer, message);
        }
        let size = match data.role.arena() {
            Arena::Persistent => plan.persistent_bytes,
            Arena::Step => plan.step_bytes,
        };
        match offset.checked_add(bytes[buffer]).filter(|&it| it <= size) {
            None => {
                let bytes = bytes[buffer];
                let message = format!("{bytes} bytes at {offset} leave an arena of {size}");
                cx.buffer(PROPERTY, buffer, message);
            }
            Some(end) if data.role.arena() == Arena::Persistent && end > offset => {
                persistent.push((offset, end, buffer));
            }
            Some(_) => {}
        }
    }
    persistent.sort();
    for pair in persistent.windows(2) {
        if pair[1].0 < pair[0].1 {
            let message = format!("overlaps %{}, and both survive a step", cx.name(pair[0].2));
            cx.buffer(Property::Lifetimes, pair[1].2, message);
        }
    }
    valid
}

/// Arenas end where their last buffer does, and the peak that is reported is the one there is.
pub(super) fn sizes(cx: &mut Cx<'_>, bytes: &SecondaryMap<Buffer, u64>, flow: &Flow) {
    let plan = cx.plan;
    let end = |arena: Arena| {
        let of = plan.buffers.iter().filter(|it| it.1.role.arena() == arena);
        let ends = of.map(|(it, data)| data.offset.unwrap_or(0).saturating_add(bytes[it]));
        ends.max().unwrap_or(0).next_multiple_of(ALIGN)
    };
    let stated = [
        ("persistent", end(Arena::Persistent), plan.persistent_bytes),
        ("step", end(Arena::Step), plan.step_bytes),
    ];
    for (name, found, stated) in stated {
        if found < stated {
            let message =
                format!("{name}_bytes is {stated}, and the last buffer ends before {found}");
            cx.program(PROPERTY, message);
        }
    }
    let (profile, live) = (memory_profile(plan), peak(cx, bytes, flow));
    if profile.live_bytes != live || live > plan.step_bytes {
        let (reported, arena) = (profile.live_bytes, plan.step_bytes);
        let message =
            format!("{live} bytes are live at once, where {reported} are reported of {arena}");
        cx.program(PROPERTY, message);
    }
    let counts = vec![
        ("buffers", plan.buffers.len() as u64),
        ("persistent bytes", plan.persistent_bytes),
        ("step bytes", plan.step_bytes),
        ("bytes live at the peak", live),
    ];
    cx.proof.add(PROPERTY, counts);
}

/// Bytes of the step's arena that are live at once, at most: bytes count once, also where a result takes
/// over those of an operand.
fn peak(cx: &Cx<'_>, bytes: &SecondaryMap<Buffer, u64>, flow: &Flow) -> u64 {
    let plan = cx.plan;
    let mut peak = 0;
    for sections in PlanSection::TIMELINES {
        let last = sections[sections.len() - 1];
        // When a buffer is touched last; what is carried, at the end.
        let ends = |buffer: Buffer| -> Option<(PlanSection, usize)> {
            let all = flow.reads[buffer].iter().chain(&flow.writes[buffer]);
            let last_touch = all.filter(|it| sections.contains(&it.0)).max().copied();
            match plan.buffers[buffer].role {
                Role::Carried => last_touch.map(|_| (last, usize::MAX)),
                Role::Temp => last_touch,
                Role::Param | Role::State | Role::Input => None,
            }
        };
        // Some buffers are touched by every layer.
        let mut ends_of: SecondaryMap<Buffer, Option<(PlanSection, usize)>> = SecondaryMap::new();
        ends_of.resize(plan.buffers.len());
        plan.buffers.keys().for_each(|it| ends_of[it] = ends(it));
        let mut live = 0_u64;
        let mut is_live: SecondaryMap<Buffer, bool> = SecondaryMap::new();
        is_live.resize(plan.buffers.len());
        for (at, instruction) in plan.timeline(sections) {
            let touched: Buffers =
                instruction.reads().into_iter().chain(instruction.writes()).collect();
            let mut shared = 0;
            let place = |it: Buffer| (plan.buffers[it].offset, bytes[it]);
            // The places of all that the instruction touches. They are needed once it makes something.
            let mut places: Option<FxHashSet<(Option<u64>, u64)>> = None;
            for (i, &buffer) in touched.iter().enumerate() {
                if is_live[buffer] || ends_of[buffer].is_none() {
                    continue;
                }
                is_live[buffer] = true;
                live += bytes[buffer];
                let places = places.get_or_insert_with(|| {
                    let before = touched[..i].iter().filter(|&&it| is_live[it]);
                    before.map(|&it| place(it)).collect()
                });
                if !places.insert(place(buffer)) {
                    shared += bytes[buffer];
                }
            }
            peak = peak.max(live - shared.min(live));
            for &buffer in &touched {
                if is_live[buffer] && ends_of[buffer] == Some(at) {
                    is_live[buffer] = false;
                    live -= bytes[buffer];
                }
            }
        }
    }
    peak
}
