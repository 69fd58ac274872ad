//! Mutations of a plan, in fourteen kinds, by seed.

use ir::DType;
use ir::ops::CollectiveKind;
use ir::placement::{AxisSet, Digit, DimLayout, ReduceOp};
use ir::plan::{ALIGN, Arena, Buffer, Comm, Instruction, Plan, Role, Stream, StreamKind};
use ir::verify::Property;

use super::split_mix;

/// What is done to a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    DropWait,
    SwapCollectives,
    ShiftOffset,
    ShrinkArena,
    DropReduction,
    DuplicateReduction,
    ChangeAxes,
    DropAllGather,
    AliasBuffers,
    ChangeDtype,
    DropAmax,
    ReorderStreams,
    DropOp,
    ChangeGranule,
}

impl Kind {
    pub const ALL: [Kind; 14] = [
        Kind::DropWait,
        Kind::SwapCollectives,
        Kind::ShiftOffset,
        Kind::ShrinkArena,
        Kind::DropReduction,
        Kind::DuplicateReduction,
        Kind::ChangeAxes,
        Kind::DropAllGather,
        Kind::AliasBuffers,
        Kind::ChangeDtype,
        Kind::DropAmax,
        Kind::ReorderStreams,
        Kind::DropOp,
        Kind::ChangeGranule,
    ];

    /// As the table calls it.
    pub fn name(self) -> &'static str {
        match self {
            Kind::DropWait => "drop a wait",
            Kind::SwapCollectives => "swap two collectives",
            Kind::ShiftOffset => "shift an offset",
            Kind::ShrinkArena => "shrink an arena",
            Kind::DropReduction => "drop a reduction",
            Kind::DuplicateReduction => "duplicate a reduction",
            Kind::ChangeAxes => "change an axis set",
            Kind::DropAllGather => "drop an all-gather",
            Kind::AliasBuffers => "alias two buffers",
            Kind::ChangeDtype => "change a dtype",
            Kind::DropAmax => "drop an amax reduction",
            Kind::ReorderStreams => "reorder across streams",
            Kind::DropOp => "drop an op",
            Kind::ChangeGranule => "change a granule",
        }
    }

    /// What is broken, at first, where such a mutation changes what a plan means.
    pub fn reasons(self) -> &'static [Property] {
        use Property::*;
        match self {
            Kind::DropWait => &[Races],
            Kind::SwapCollectives => &[Races, Values, Lifetimes, States],
            Kind::ShiftOffset => &[Lifetimes, Races, Memory],
            Kind::ShrinkArena => &[Memory],
            Kind::DropReduction | Kind::DropAmax => &[Reductions, Values, States],
            Kind::DuplicateReduction => &[Reductions, Values, Lifetimes, Races],
            Kind::ChangeAxes => &[Types, Reductions, Communication],
            Kind::DropAllGather => &[Types, Values, States],
            Kind::AliasBuffers => &[Values, Lifetimes, Races, Types, Memory, States],
            Kind::ChangeDtype => &[Types],
            Kind::ReorderStreams => &[Communication, Races, Values, Lifetimes],
            Kind::DropOp => &[Values, States, Gradients],
            Kind::ChangeGranule => &[Types],
        }
    }
}

/// Choices by SplitMix64.
pub struct Choices(pub u64);

impl Choices {
    pub fn below(&mut self, n: usize) -> usize {
        split_mix(&mut self.0) as usize % n
    }

    pub fn of<T: Clone>(&mut self, from: &[T]) -> Option<T> {
        (!from.is_empty()).then(|| from[self.below(from.len())].clone())
    }
}

/// A mutant of `plan`; none where the choice cannot be made.
pub fn mutant(plan: &Plan, kind: Kind, choices: &mut Choices) -> Option<Plan> {
    let mut res = plan.clone();
    let is_sum = |it: CollectiveKind| {
        matches!(
            it,
            CollectiveKind::AllReduce(ReduceOp::Sum) | CollectiveKind::ReduceScatter(ReduceOp::Sum)
        )
    };
    let changed = match kind {
        Kind::DropWait => drop_one(&mut res, choices, |it| matches!(it, Instruction::Wait { .. })),
        Kind::SwapCollectives => swap_collectives(&mut res, choices),
        Kind::ShiftOffset => shift_offset(&mut res, choices),
        Kind::ShrinkArena => shrink_arena(&mut res, choices),
        Kind::DropReduction => drop_collective(&mut res, choices, is_sum),
        Kind::DropAllGather => {
            drop_collective(&mut res, choices, |it| it == CollectiveKind::AllGather)
        }
        Kind::DropAmax => {
            drop_collective(&mut res, choices, |it| it == CollectiveKind::AllReduce(ReduceOp::Max))
        }
        Kind::DuplicateReduction => duplicate(&mut res, choices, is_sum),
        Kind::ChangeAxes => change_axes(&mut res, choices),
        Kind::AliasBuffers => alias(&mut res, choices),
        Kind::ChangeDtype => change_dtype(&mut res, choices),
        Kind::ReorderStreams => reorder(&mut res, choices),
        Kind::DropOp => drop_op(&mut res, choices),
        Kind::ChangeGranule => change_granule(&mut res, choices),
    };
    changed.filter(|()| res != *plan).map(|()| res)
}

type At = (usize, usize);

/// Places of instructions.
fn places(plan: &Plan, fits: impl Fn(&Instruction) -> bool) -> Vec<At> {
    let mut res = Vec::new();
    for (section, instructions) in plan.sections.iter().enumerate() {
        let indices = instructions.iter().enumerate().filter(|it| fits(it.1));
        res.extend(indices.map(|it| (section, it.0)));
    }
    res
}

fn drop_one(
    plan: &mut Plan,
    choices: &mut Choices,
    fits: impl Fn(&Instruction) -> bool,
) -> Option<()> {
    let (section, index) = choices.of(&places(plan, fits))?;
    plan.sections[section].remove(index);
    Some(())
}

/// Any op, or one that writes what outlives a step, which is there without it.
fn drop_op(plan: &mut Plan, choices: &mut Choices) -> Option<()> {
    let persists = |it: &Buffer| plan.buffers[*it].role.arena() == Arena::Persistent;
    let any = choices.below(2) == 0;
    let ops = places(plan, |it| match it {
        Instruction::Compute { results, .. } => any || results.iter().any(persists),
        _ => false,
    });
    let (section, index) = choices.of(&ops)?;
    plan.sections[section].remove(index);
    Some(())
}

fn moves(instruction: &Instruction) -> bool {
    matches!(instruction, Instruction::Collective { kind, .. } if !kind.is_local())
}

/// Two neighbours of one stream, or any two of a section.
fn swap_collectives(plan: &mut Plan, choices: &mut Choices) -> Option<()> {
    let all = places(plan, moves);
    let first = choices.of(&all)?;
    let same_stream = choices.below(2) == 0;
    let stream = |it: At| plan.sections[it.0][it.1].stream();
    let others: Vec<At> = all
        .iter()
        .copied()
        .filter(|it| it.0 == first.0 && it.1 > first.1)
        .filter(|it| !same_stream || stream(*it) == stream(first))
        .collect();
    let second = if same_stream { others.first().copied()? } else { choices.of(&others)? };
    plan.sections[first.0].swap(first.1, second.1);
    Some(())
}

fn shift_offset(plan: &mut Plan, choices: &mut Choices) -> Option<()> {
    let buffer = choices.of(&plan.buffers.keys().collect::<Vec<_>>())?;
    let bytes = plan.local_bytes(buffer);
    let arena = match plan.buffers[buffer].role.arena() {
        Arena::Persistent => plan.persistent_bytes,
        Arena::Step => plan.step_bytes,
    };
    let data = &mut plan.buffers[buffer];
    let offset = data.offset?;
    let by = ALIGN * (1 + choices.below(4) as u64);
    data.offset = Some(match choices.below(8) {
        0..=2 => offset + by,
        3..=5 => offset.saturating_sub(by),
        // Anywhere in the arena.
        6 => choices.below((arena.saturating_sub(bytes) / ALIGN + 1) as usize) as u64 * ALIGN,
        _ => offset + [4, 32, 128][choices.below(3)],
    });
    Some(())
}

fn shrink_arena(plan: &mut Plan, choices: &mut Choices) -> Option<()> {
    let arena = match choices.below(2) {
        0 => &mut plan.step_bytes,
        _ => &mut plan.persistent_bytes,
    };
    *arena = arena.saturating_sub([1, ALIGN, 4 * ALIGN, *arena / 2][choices.below(4)]);
    Some(())
}

/// A part of a collective goes: its reader finds nothing, reads what was to be moved, gets a copy of it, or
/// is told that it need not be moved.
fn drop_collective(
    plan: &mut Plan,
    choices: &mut Choices,
    fits: impl Fn(CollectiveKind) -> bool,
) -> Option<()> {
    let all = places(
        plan,
        |it| matches!(it, Instruction::Collective { kind, .. } if !kind.is_local() && fits(*kind)),
    );
    let (section, index) = choices.of(&all)?;
    let Instruction::Collective { parts, stream, .. } = &mut plan.sections[section][index] else {
        return None;
    };
    let stream = *stream;
    let whole = choices.below(3) == 0;
    let gone = match whole {
        true => std::mem::take(parts).into_vec(),
        false => {
            let at = choices.below(parts.len());
            vec![parts.remove(at)]
        }
    };
    let rest = !parts.is_empty();
    if !rest {
        plan.sections[section].remove(index);
    }
    match choices.below(4) {
        0 => (),
        1 => gone.iter().for_each(|it| rename(plan, it.dst, it.src, false)),
        2 => {
            for it in gone {
                let copy = Instruction::Copy { src: it.src, dst: it.dst, stream };
                plan.sections[section].insert(index, copy);
            }
        }
        _ => {
            for it in gone {
                plan.buffers[it.src].sharding = plan.buffers[it.dst].sharding.clone();
                rename(plan, it.dst, it.src, false);
            }
        }
    }
    Some(())
}

/// Readers of `old` read `new`; what makes it makes `new`, if `writes`.
fn rename(plan: &mut Plan, old: Buffer, new: Buffer, writes: bool) {
    for instruction in plan.sections.iter_mut().flatten() {
        let (reads, made): (Vec<&mut Buffer>, Vec<&mut Buffer>) = match instruction {
            Instruction::Compute { args, results, .. } => {
                (args.iter_mut().collect(), results.iter_mut().collect())
            }
            Instruction::Collective { parts, .. } => {
                parts.iter_mut().map(|it| (&mut it.src, &mut it.dst)).unzip()
            }
            Instruction::Copy { src, dst, .. } => (vec![src], vec![dst]),
            Instruction::Record { .. } | Instruction::Wait { .. } => continue,
        };
        let made = made.into_iter().filter(|_| writes);
        reads.into_iter().chain(made).filter(|it| **it == old).for_each(|it| *it = new);
    }
}

/// Again at once, again later, what was reduced again, or a sum over micro-batches again.
fn duplicate(
    plan: &mut Plan,
    choices: &mut Choices,
    fits: impl Fn(CollectiveKind) -> bool,
) -> Option<()> {
    let all = places(plan, |it| matches!(it, Instruction::Collective { kind, .. } if fits(*kind)));
    let (section, index) = choices.of(&all)?;
    let again = plan.sections[section][index].clone();
    match choices.below(4) {
        0 => plan.sections[section].insert(index + 1, again),
        1 => {
            let later = index + 1 + choices.below(plan.sections[section].len() - index);
            plan.sections[section].insert(later, again);
        }
        2 => {
            // The result is reduced once more, into a buffer of its own.
            let Instruction::Collective { kind, comm, parts, stream } = again else { return None };
            let kind = CollectiveKind::AllReduce(kind.reduce()?);
            let part = parts[choices.below(parts.len())];
            let mut data = plan.buffers[part.dst].clone();
            data.name.push_str(".twice");
            data.role = Role::Temp;
            data.offset = Some(plan.step_bytes);
            let twice = plan.buffers.push(data);
            plan.step_bytes += plan.local_bytes(twice).next_multiple_of(ALIGN);
            rename(plan, part.dst, twice, false);
            let parts = [ir::plan::Part { src: part.dst, dst: twice, adds: false }].into();
            let call = Instruction::Collective { kind, comm, parts, stream };
            plan.sections[section].insert(index + 1, call);
        }
        _ => {
            let sums = places(plan, |it| match it {
                Instruction::Compute { args, results, .. } => {
                    results.iter().any(|it| args.contains(it))
                }
                _ => false,
            });
            let (section, index) = choices.of(&sums)?;
            let again = plan.sections[section][index].clone();
            plan.sections[section].insert(index + 1, again);
        }
    }
    Some(())
}

/// The communicator of a collective, the axes of a communicator, or those of a buffer's layout.
fn change_axes(plan: &mut Plan, choices: &mut Choices) -> Option<()> {
    let mesh = plan.mesh.clone();
    let any = |choices: &mut Choices| -> AxisSet {
        mesh.axes().filter(|_| choices.below(2) == 0).collect()
    };
    match choices.below(4) {
        0 => {
            let all = places(plan, |it| matches!(it, Instruction::Collective { .. }));
            let (section, index) = choices.of(&all)?;
            let other: Comm = choices.of(&plan.comms.keys().collect::<Vec<_>>())?;
            let Instruction::Collective { comm, .. } = &mut plan.sections[section][index] else {
                return None;
            };
            *comm = other;
        }
        1 => {
            let comm: Comm = choices.of(&plan.comms.keys().collect::<Vec<_>>())?;
            plan.comms[comm] = any(choices);
        }
        2 => {
            let all = plan.buffers.iter().filter(|it| it.1.sharding.partial.is_some());
            let buffer: Buffer = choices.of(&all.map(|it| it.0).collect::<Vec<_>>())?;
            let sharding = &mut plan.buffers[buffer].sharding;
            let axes = any(choices).minus(sharding.sharded_axes());
            *sharding = sharding.with_partial(ReduceOp::Sum, axes);
        }
        _ => {
            let all = plan.buffers.iter().filter(|it| !it.1.sharding.sharded_axes().is_empty());
            let buffer: Buffer = choices.of(&all.map(|it| it.0).collect::<Vec<_>>())?;
            let sharding = &mut plan.buffers[buffer].sharding;
            let dim = choices.below(sharding.dims.len());
            let axes: Vec<_> = mesh.axes().collect();
            let to = choices.of(&axes)?;
            let digits: Vec<Digit> = sharding.dims[dim].digits().to_vec();
            let at = choices.below(digits.len().max(1));
            let changed = digits.iter().enumerate().map(|(i, &it)| match i == at {
                true => Digit::Axis(to),
                false => it,
            });
            sharding.dims[dim] = match choices.below(2) {
                0 => DimLayout::new(changed.collect::<Vec<_>>()),
                _ => DimLayout::new(digits.iter().copied().rev().collect::<Vec<_>>()),
            };
        }
    }
    Some(())
}

/// A dimension is cut into multiples of something else, of 1 among them.
fn change_granule(plan: &mut Plan, choices: &mut Choices) -> Option<()> {
    let cut = |it: &Buffer| !plan.buffers[*it].sharding.sharded_axes().is_empty();
    let rounded = |it: &Buffer| plan.buffers[*it].sharding.dims.iter().any(|it| it.granule() > 1);
    let mut all: Vec<Buffer> = plan.buffers.keys().filter(cut).collect();
    if all.iter().any(rounded) {
        all.retain(rounded);
    }
    let data = &mut plan.buffers[choices.of(&all)?];
    let dim = data.sharding.dims.iter().position(|it| !it.is_whole())?;
    let size = data.ty.shape[dim];
    let granules: Vec<u32> = [1, 2, 3, 4, 64, 128, 256, 384, size as u32]
        .into_iter()
        .filter(|&it| it > 0 && size.is_multiple_of(it.into()))
        .collect();
    let layout = data.sharding.dims[dim].clone().in_granules(choices.of(&granules)?);
    data.sharding.dims[dim] = layout;
    Some(())
}

/// One buffer gets the place of another, or is it.
fn alias(plan: &mut Plan, choices: &mut Choices) -> Option<()> {
    let all: Vec<Buffer> = plan.buffers.keys().collect();
    let first = choices.of(&all)?;
    let arena = |it: Buffer| plan.buffers[it].role.arena();
    let by_place = choices.below(2) == 0;
    let alike = |it: &Buffer| {
        let (a, b) = (&plan.buffers[first], &plan.buffers[*it]);
        *it != first
            && arena(*it) == arena(first)
            && (by_place || (a.ty == b.ty && a.sharding == b.sharding && a.role == b.role))
    };
    let others: Vec<Buffer> = all.iter().copied().filter(alike).collect();
    let second = choices.of(&others)?;
    if by_place {
        plan.buffers[second].offset = plan.buffers[first].offset;
        return Some(());
    }
    rename(plan, second, first, true);
    Some(())
}

fn change_dtype(plan: &mut Plan, choices: &mut Choices) -> Option<()> {
    let buffer = choices.of(&plan.buffers.keys().collect::<Vec<_>>())?;
    let all = [DType::F32, DType::Bf16, DType::I32, DType::E4M3, DType::E5M2];
    plan.buffers[buffer].ty.dtype = choices.of(&all)?;
    Some(())
}

/// An instruction goes to another stream, or earlier or later among those of other streams and its own.
fn reorder(plan: &mut Plan, choices: &mut Choices) -> Option<()> {
    let waits =
        |it: &Instruction| matches!(it, Instruction::Record { .. } | Instruction::Wait { .. });
    match choices.below(4) {
        0 => {
            let all = places(plan, |it| moves(it) || waits(it));
            let (section, index) = choices.of(&all)?;
            let to: Stream = choices.of(&plan.streams.keys().collect::<Vec<_>>())?;
            set_stream(&mut plan.sections[section][index], to);
        }
        1 => {
            // A stream of its own.
            let all = places(plan, moves);
            let (section, index) = choices.of(&all)?;
            let to = plan.streams.push(StreamKind::Comm.into());
            set_stream(&mut plan.sections[section][index], to);
        }
        2 => {
            let all = places(plan, waits);
            let (section, index) = choices.of(&all)?;
            let other = (index + 1 + choices.below(3)).min(plan.sections[section].len() - 1);
            plan.sections[section][index..=other].rotate_left(1);
        }
        _ => {
            let all = places(plan, |it| waits(it) || moves(it));
            let (section, index) = choices.of(&all)?;
            let other = index.saturating_sub(1 + choices.below(6));
            plan.sections[section][other..=index].rotate_right(1);
        }
    }
    Some(())
}

fn set_stream(instruction: &mut Instruction, to: Stream) {
    match instruction {
        Instruction::Compute { stream, .. }
        | Instruction::Collective { stream, .. }
        | Instruction::Copy { stream, .. }
        | Instruction::Record { stream, .. }
        | Instruction::Wait { stream, .. } => *stream = to,
    }
}
