//! `communication`: ranks meet in every collective, so nobody waits forever.
//!
//! Every coordinate runs the same list: an instruction has no condition, and no collective depends on
//! how much a coordinate holds, be it nothing. A communicator is a set of mesh axes, so that its groups
//! are the coordinates that agree on all others: each coordinate is in exactly one group of each. The
//! rest is order. Collectives of one communicator are on one stream, so every member starts them in the
//! same order; and a wait is for an event that was recorded before, in the same section. Then issue order
//! is a total order of all instructions that every dependency follows, on every rank, within and across
//! communicators. Of all instructions of all ranks that are not done, the one that was issued first can
//! always go on: what its stream and its events wait for is done, and if it is a collective, no other
//! member is behind it. So there is no cycle.
//!
//! Where a wait comes first, the cycle is looked for, and named.

use cranelift_entity::SecondaryMap;

use super::{At, Cx, at_text, show};
use crate::Phase;
use crate::plan::{Comm, Instruction, Plan, PlanSection, Stream, StreamKind};
use crate::verify::Property;

const PROPERTY: Property = Property::Communication;

pub(super) fn check(cx: &mut Cx<'_>) {
    let calls = streams(cx);
    let waits = events(cx);
    let counts = vec![
        ("communicators", cx.plan.comms.len() as u64),
        ("collectives", calls),
        ("waits", waits),
        ("coordinates", cx.plan.mesh.n_ranks()),
    ];
    cx.proof.add(PROPERTY, counts);
}

/// Who is on which stream; the number of collectives.
fn streams(cx: &mut Cx<'_>) -> u64 {
    let plan = cx.plan;
    let mut stream_of: SecondaryMap<Comm, Option<(Stream, At)>> = SecondaryMap::new();
    let mut calls = 0;
    for (at, instruction) in plan.timeline(&PlanSection::ALL) {
        let stream = instruction.stream();
        if plan.phase < Phase::Scheduled && stream != Stream::from_u32(0) {
            cx.instruction(PROPERTY, at, "is scheduled too early".into());
        }
        match instruction {
            Instruction::Collective { kind, comm, .. } if !kind.is_local() => {
                calls += 1;
                let (first, where_) = *stream_of[*comm].get_or_insert((stream, at));
                if first != stream {
                    let message = format!(
                        "{comm} has collectives on {first} and on {stream}, so that ranks may start \
                         this one and that of {} in different orders",
                        at_text(where_)
                    );
                    cx.instruction(PROPERTY, at, message);
                }
            }
            Instruction::Collective { .. }
            | Instruction::Compute { .. }
            | Instruction::Copy { .. } => {
                if plan.streams[stream].kind != StreamKind::Compute {
                    let message = "computes on a stream for communication".into();
                    cx.instruction(PROPERTY, at, message);
                }
            }
            Instruction::Record { .. } | Instruction::Wait { .. } => {}
        }
    }
    calls
}

/// Events are recorded once, and waited for after that; the number of waits.
fn events(cx: &mut Cx<'_>) -> u64 {
    let plan = cx.plan;
    let mut recorded = vec![None; plan.events as usize];
    let mut waits = 0;
    let mut early = Vec::new();
    for (at, instruction) in plan.timeline(&PlanSection::ALL) {
        match instruction {
            Instruction::Record { event, .. } => {
                if recorded[event.as_u32() as usize].replace(at.0).is_some() {
                    cx.instruction(PROPERTY, at, "the event is recorded twice".into());
                }
            }
            Instruction::Wait { event, .. } => {
                waits += 1;
                if recorded[event.as_u32() as usize] != Some(at.0) {
                    early.push(at);
                }
            }
            Instruction::Compute { .. }
            | Instruction::Collective { .. }
            | Instruction::Copy { .. } => {}
        }
    }
    for at in early {
        let mut message = "waits for what this section has not recorded".to_string();
        if let Some(cycle) = cycle(plan, at) {
            message.push_str(": a cycle of waits, ");
            message.push_str(&cycle);
        }
        cx.instruction(PROPERTY, at, message);
    }
    waits
}

/// Instructions that a wait needs, and that need it: each behind the next on its stream, or recorded by it.
fn cycle(plan: &Plan, (section, wait): At) -> Option<String> {
    let instructions = plan.section(section);
    let recorded = |wanted| {
        let is =
            |it: &Instruction| matches!(it, Instruction::Record { event, .. } if *event == wanted);
        instructions.iter().position(is)
    };
    // From each instruction to those that it needs: the one before on its stream, and what records.
    let needs = |index: usize| {
        let stream = instructions[index].stream();
        let before = (0..index).rev().find(|&it| instructions[it].stream() == stream);
        let event = match &instructions[index] {
            Instruction::Wait { event, .. } => recorded(*event),
            _ => None,
        };
        [event, before]
    };
    let mut came_from: Vec<Option<usize>> = vec![None; instructions.len()];
    let mut open = vec![wait];
    while let Some(index) = open.pop() {
        for next in needs(index).into_iter().flatten() {
            if next == wait {
                let mut path = vec![index];
                while *path.last()? != wait {
                    path.push(came_from[*path.last()?]?);
                }
                path.reverse();
                return Some(path_text(plan, section, &path));
            }
            if came_from[next].is_none() {
                came_from[next] = Some(index);
                open.push(next);
            }
        }
    }
    None
}

/// Waits, records and collectives on a way, each needing the next, and the last one the first.
fn path_text(plan: &Plan, section: PlanSection, path: &[usize]) -> String {
    const N_SHOWN: usize = 9;
    let tells = |it: &&usize| match &plan.section(section)[**it] {
        Instruction::Collective { kind, .. } => !kind.is_local(),
        Instruction::Record { .. } | Instruction::Wait { .. } => true,
        Instruction::Compute { .. } | Instruction::Copy { .. } => false,
    };
    let shown: Vec<String> = path
        .iter()
        .filter(tells)
        .map(|&it| {
            format!("{} `{}`", at_text((section, it)), show(plan, &plan.section(section)[it]))
        })
        .collect();
    let more = shown.len().saturating_sub(N_SHOWN);
    let mut text = shown[..shown.len() - more].join(" needs ");
    if more > 0 {
        text.push_str(&format!(" needs {more} more"));
    }
    text + ", which needs the first"
}
