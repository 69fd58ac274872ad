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
use smallvec::SmallVec;

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
    let cycles = PlanSection::ALL.map(|section| {
        let early: Vec<usize> = early.iter().filter(|it| it.0 == section).map(|it| it.1).collect();
        cycle(plan, section, &early).map(|it| (section, it))
    });
    for at in early {
        let mut message = "waits for what this section has not recorded".to_string();
        let found = cycles.iter().flatten().find(|it| (it.0, it.1[0]) == at);
        if let Some((section, cycle)) = found {
            message.push_str(": a cycle of waits, ");
            message.push_str(&path_text(plan, *section, cycle));
        }
        cx.instruction(PROPERTY, at, message);
    }
    waits
}

/// Instructions of a section of which each needs the next, and the last one the first: it is behind that on
/// its stream, or waits for what that records. Starts with a wait of `early`, those ahead of their records;
/// every cycle has one, as all else needs what was issued before it.
///
/// One search, depth first, for all of `early`: an instruction whose needs led to no cycle is left alone.
fn cycle(plan: &Plan, section: PlanSection, early: &[usize]) -> Option<Vec<usize>> {
    let instructions = plan.section(section);
    let mut recorded = vec![None; plan.events as usize];
    let mut last: SecondaryMap<Stream, Option<usize>> = SecondaryMap::new();
    let mut before = Vec::with_capacity(instructions.len());
    for (index, instruction) in instructions.iter().enumerate() {
        before.push(last[instruction.stream()].replace(index));
        if let Instruction::Record { event, .. } = instruction {
            recorded[event.as_u32() as usize].get_or_insert(index);
        }
    }
    let event = |index: usize| match &instructions[index] {
        Instruction::Wait { event, .. } => recorded[event.as_u32() as usize],
        _ => None,
    };
    let mut seen = vec![false; instructions.len()];
    let mut on_path = vec![false; instructions.len()];
    for &wait in early {
        // What led here, with what it needs and has not been looked at.
        let mut path: Vec<(usize, SmallVec<[usize; 2]>)> = Vec::new();
        let mut next = Some(wait).filter(|&it| !seen[it]);
        loop {
            if let Some(index) = next {
                (seen[index], on_path[index]) = (true, true);
                path.push((index, event(index).into_iter().chain(before[index]).collect()));
            }
            let Some((index, needs)) = path.last_mut() else { break };
            next = needs.pop();
            match next {
                Some(it) if on_path[it] => {
                    let mut res: Vec<usize> =
                        path.iter().map(|it| it.0).skip_while(|&from| from != it).collect();
                    let first =
                        res.iter().enumerate().filter(|it| early.binary_search(it.1).is_ok());
                    let first = first.min_by_key(|it| it.1).map_or(0, |it| it.0);
                    res.rotate_left(first);
                    return Some(res);
                }
                Some(it) if seen[it] => next = None,
                Some(_) => {}
                None => {
                    on_path[*index] = false;
                    path.pop();
                }
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
