//! `program`: handles exist, names are distinct, lists name what they should, data fits.

use cranelift_entity::{EntityRef, SecondaryMap};
use rustc_hash::{FxBuildHasher, FxHashSet};
use smallvec::SmallVec;

use super::{At, Cx, Flow};
use crate::model::check_run;
use crate::ops::{LookUp, Op};
use crate::plan::{ALIGN, Buffer, Instruction, Plan, PlanSection, Role, StreamKind};
use crate::types::TensorType;
use crate::verify::op::{Checker, Class};
use crate::verify::params::{Declared, faults};
use crate::verify::{Place, Property};

/// Everything later may index freely.
pub(super) fn handles(cx: &mut Cx<'_>) {
    let plan = cx.plan;
    let is_buffer = |it: &Buffer| it.index() < plan.buffers.len();
    let program = |cx: &mut Cx<'_>, message: &str| cx.program(Property::Program, message.into());
    if let Err(error) = plan.mesh.validate() {
        program(cx, &error.to_string());
    }
    if plan.micro_batches == 0 {
        program(cx, "a step has no micro-batch");
    }
    for section in PlanSection::MICRO_BATCHES {
        if plan.runs(section) == 0 && !plan.section(section).is_empty() {
            let (name, n) = (section.name(), plan.micro_batches);
            program(cx, &format!("`{name}` never runs in {n} micro-batches"));
        }
    }
    if plan.streams.values().next().map(|it| it.kind) != Some(StreamKind::Compute) {
        program(cx, "the first stream is not for compute");
    }
    if let Some((stream, it)) = plan.streams.iter().find(|it| it.1.workspace % ALIGN != 0) {
        program(cx, &format!("{stream}: {} is not a multiple of {ALIGN}", it.workspace));
    }
    for (at, instruction) in plan.timeline(&PlanSection::ALL) {
        let stream = instruction.stream().index() < plan.streams.len();
        let rest = match instruction {
            Instruction::Compute { args, results, .. } => args.iter().chain(results).all(is_buffer),
            Instruction::Collective { comm, parts, .. } => {
                comm.index() < plan.comms.len()
                    && parts.iter().all(|it| is_buffer(&it.src) && is_buffer(&it.dst))
            }
            Instruction::Copy { src, dst, .. } => is_buffer(src) && is_buffer(dst),
            Instruction::Record { event, .. } | Instruction::Wait { event, .. } => {
                event.index() < plan.events as usize
            }
        };
        if !(stream && rest) {
            let place = Place::Instruction { section: at.0, index: at.1 };
            let message = "names a buffer, stream, event or communicator that does not exist";
            cx.fail(Property::Program, place, format!("{instruction:?}"), message.to_string());
        }
    }
    let mut named =
        plan.params.iter().map(|it| it.buffer).chain(plan.results.iter().map(|it| it.1));
    if !named.all(|it| is_buffer(&it)) {
        program(cx, "a parameter or result is in a buffer that does not exist");
    }
    if plan.comms.values().any(|it| !it.is_subset(plan.mesh.all())) {
        program(cx, "a communicator is over an axis that the mesh lacks");
    }
}

/// The class of each buffer, unless one has no valid sharding.
pub(super) fn buffers<'a>(
    cx: &mut Cx<'a>,
    checker: &mut Checker<'a>,
) -> Option<SecondaryMap<Buffer, Class>> {
    let plan = cx.plan;
    let mut names: FxHashSet<&str> =
        FxHashSet::with_capacity_and_hasher(plan.buffers.len(), FxBuildHasher);
    let mut class_of = SecondaryMap::new();
    class_of.resize(plan.buffers.len());
    let mut valid = true;
    for (buffer, data) in &plan.buffers {
        if !names.insert(&data.name) {
            cx.buffer(Property::Program, buffer, "another buffer has this name".into());
        }
        match checker.class(&data.ty, &data.sharding) {
            Ok(class) => class_of[buffer] = class,
            Err(error) => {
                valid = false;
                let place = Place::Buffer(data.name.clone());
                cx.fail(Property::Types, place, data.ty.to_string(), error.to_string());
            }
        }
    }
    let mut listed: SecondaryMap<Buffer, bool> = SecondaryMap::new();
    for param in &plan.params {
        if std::mem::replace(&mut listed[param.buffer], true) {
            let message = "is listed as a parameter more than once".into();
            cx.buffer(Property::Program, param.buffer, message);
        }
        let data = &plan.buffers[param.buffer];
        if let Some(label) = &param.label
            && (label.validate(&data.ty.shape, &plan.mesh).is_err()
                || label.without_unit_axes(&plan.mesh) != data.sharding)
        {
            let message =
                format!("has the label {}, which is another layout", label.display(&plan.mesh));
            cx.buffer(Property::Program, param.buffer, message);
        }
        if data.role != Role::Param {
            let message = "holds a parameter, and says that it does not".into();
            cx.buffer(Property::Program, param.buffer, message);
        }
    }
    for param in &plan.params {
        let dtype = plan.buffers[param.buffer].ty.dtype;
        if !dtype.is_float() {
            let message = format!("is a parameter in {dtype}, which holds no real numbers");
            cx.buffer(Property::Types, param.buffer, message);
        }
    }
    let declared: Vec<Declared<'_>> = plan
        .params
        .iter()
        .map(|it| Declared { name: cx.name(it.buffer), init: &it.init, aliases: &it.aliases })
        .collect();
    for (index, message) in faults(&declared) {
        let place = Place::Param(declared[index].name.to_string());
        cx.fail(Property::Program, place, String::new(), message);
    }
    for (name, buffer) in &plan.results {
        let data = &plan.buffers[*buffer];
        if data.role == Role::Temp {
            let message = format!("holds the result `{name}`, and is a temporary");
            cx.buffer(Property::Values, *buffer, message);
        }
        let partial = !data.sharding.partial_axes().is_empty();
        if partial || !data.sharding.sharded_axes().is_empty() {
            let property = if partial { Property::Reductions } else { Property::Types };
            let message = format!("holds the result `{name}`, and is not whole on every rank");
            cx.buffer(property, *buffer, message);
        }
    }
    valid.then_some(class_of)
}

/// Parameters are all listed, `run` is one that a model may have, with the batch that buffers have, and the ids
/// that it lets in are found in every table. A table may have more rows: padded ones.
pub(super) fn run(cx: &mut Cx<'_>, flow: &Flow) {
    let plan = cx.plan;
    let mut listed: SecondaryMap<Buffer, bool> = SecondaryMap::new();
    plan.params.iter().for_each(|it| listed[it.buffer] = true);
    let params = plan.buffers.iter().filter(|it| it.1.role == Role::Param);
    let unlisted: Vec<Buffer> = params.map(|it| it.0).filter(|&it| !listed[it]).collect();
    for buffer in unlisted {
        let message = "is a parameter, and no `param` line says how it starts".into();
        cx.buffer(Property::Program, buffer, message);
    }
    if let Err(error) = check_run(&plan.run) {
        cx.fail(Property::Program, Place::Run, String::new(), error.to_string());
    }
    for name in ["tokens", "labels"] {
        if let Some(message) = other_batch(plan, name) {
            cx.fail(Property::Program, Place::Run, String::new(), message);
        }
    }
    let rows = looked_up(cx, flow);
    if let Some(&(rows, by)) = rows.iter().min_by_key(|it| it.0)
        && rows < plan.run.vocab
    {
        let vocab = plan.run.vocab;
        let message = format!("`run` says that ids are below {vocab}, and this has {rows} of them");
        cx.buffer(Property::Program, by, message);
    }
    let counts = vec![
        ("instructions", plan.sections.iter().map(|it| it.len() as u64).sum()),
        ("buffers", plan.buffers.len() as u64),
        ("parameters", plan.params.len() as u64),
        ("results", plan.results.len() as u64),
        ("tables of ids", rows.len() as u64),
    ];
    cx.proof.add(Property::Program, counts);
}

/// What `run` says of a batch that the buffer of its micro-batches contradicts.
fn other_batch(plan: &Plan, name: &str) -> Option<String> {
    let ty = &plan.buffers[plan.buffer(name)?].ty;
    let (batch, sequence, n) = (plan.run.global_batch, plan.run.sequence, plan.micro_batches);
    let in_rows = |it: &&u64| ty.ndim() < 2 || **it == sequence;
    let fits = batch.checked_mul(sequence) == ty.n_elements().checked_mul(n.into())
        && ty.shape.last().filter(in_rows).is_some();
    let times = if n == 1 { String::new() } else { format!(" in {n} micro-batches") };
    let message =
        format!("says that a batch is {batch} x {sequence} tokens{times}, and `{name}` is {ty}");
    (!fits).then_some(message)
}

/// Tables and logits in which ids from outside are looked up, with how many of them there are.
fn looked_up(cx: &Cx<'_>, flow: &Flow) -> Vec<(u64, Buffer)> {
    let plan = cx.plan;
    let found = plan.timeline(&PlanSection::ALL).filter_map(|(at, it)| {
        let Instruction::Compute { op, args, .. } = it else { return None };
        let types: SmallVec<[&TensorType; 4]> =
            args.iter().map(|&it| &plan.buffers[it].ty).collect();
        let LookUp { ids, table, size } = op.looks_up(&types)?;
        let root = whole(plan, flow, at, args[ids]);
        (plan.buffers[root].role == Role::Input).then_some((size, args[table]))
    });
    found.collect()
}

/// The buffer of which `ids` has a piece, for the instruction `at`: a loss in chunks has pieces of the labels.
fn whole(plan: &Plan, flow: &Flow, at: At, ids: Buffer) -> Buffer {
    let (mut buffer, mut made) = flow.moved_from(plan, at, ids);
    while let Some(index) = made
        && let Instruction::Compute { op: Op::SliceDim(_), args, .. } = &plan.section(at.0)[index]
    {
        (buffer, made) = flow.moved_from(plan, (at.0, index), args[0]);
    }
    buffer
}
