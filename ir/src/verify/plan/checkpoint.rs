//! `checkpoint`: the boxes that all coordinates write cover every element of every entry once, and what is
//! not written can be made again.
//!
//! Dimensions are cut by axes of their own, so that boxes are products of the runs of each dimension, and
//! cover the tensor once if those of each dimension cover that once: `runs` is asked for every coordinate of
//! the axes of one dimension, once for each layout and size that there is. Of those that hold the same box,
//! one must own it: every coordinate is asked, once for each set of axes that shards something. (Salts only
//! say from which copy is counted.) So no tensor is enumerated over the mesh.

use cranelift_entity::SecondaryMap;
use rustc_hash::FxHashSet;

use super::{Cx, Flow};
use crate::checkpoint::{CheckpointLayout, Entry, Source};
use crate::placement::{AxisSet, Digit, DimLayout, Mesh};
use crate::plan::{Buffer, PlanSection, Role};
use crate::verify::{Place, Property};

const PROPERTY: Property = Property::Checkpoint;

/// The most coordinates that are asked about one layout. Compiling for a larger mesh takes no longer, so what is beyond a
/// limit is counted, and not proved.
const ENUMERATED: u64 = 1 << 17;
/// The most boxes and coordinates that are enumerated for all entries together: about a second of work, whatever the
/// text of a plan says. Llama-3.1-405B on 16,384 ranks takes a fiftieth of it.
const ENUMERATED_IN_ALL: u64 = 1 << 22;

pub(super) fn check(cx: &mut Cx<'_>, flow: &Flow) {
    let plan = cx.plan;
    let layout = match CheckpointLayout::of(plan) {
        Ok(it) => it,
        Err(error) => {
            let message = error.to_string();
            return cx.fail(PROPERTY, Place::Buffer(error.name), String::new(), message);
        }
    };
    let mesh = &plan.mesh;
    let mut seen: Seen<'_> = Seen::default();
    let mut bytes = 0;
    for entry in &layout.entries {
        bytes += entry.ty.bytes();
        if let Some(wrong) = coverage(&mut seen, mesh, entry) {
            let name = match entry.source {
                Source::Buffer(buffer) => cx.name(buffer).to_string(),
                Source::Kept(_) => entry.key.clone(),
            };
            cx.fail(PROPERTY, Place::Buffer(name), entry.ty.to_string(), wrong);
        }
    }
    left_out(cx, flow, &layout);
    let counts = vec![
        ("entries", layout.entries.len() as u64),
        ("bytes", bytes),
        ("cuts of dimensions", seen.dims.len() as u64),
        ("boxes along them", seen.boxes),
        ("cuts too fine to enumerate", seen.too_fine),
        ("kinds of copies", seen.owners.len() as u64),
        ("kinds over too many coordinates to ask", seen.too_many),
    ];
    cx.proof.add(PROPERTY, counts);
}

/// What has been checked.
#[derive(Default)]
struct Seen<'a> {
    dims: FxHashSet<(&'a DimLayout, u64)>,
    owners: FxHashSet<AxisSet>,
    boxes: u64,
    /// Boxes and coordinates that were enumerated, at most.
    enumerated: u64,
    /// Cuts over more coordinates, or into more boxes, than are enumerated.
    too_fine: u64,
    /// Kinds of copies on meshes of more coordinates than are asked.
    too_many: u64,
}

impl Seen<'_> {
    /// Returns true if as many coordinates may be asked that have as many boxes together, and counts them then.
    fn enumerates(&mut self, coordinates: u64, boxes: u64) -> bool {
        let all = self.enumerated.saturating_add(coordinates.max(boxes));
        let is_few = coordinates <= ENUMERATED && all <= ENUMERATED_IN_ALL;
        if is_few {
            self.enumerated = all;
        }
        is_few
    }
}

/// The most boxes that the coordinates over the axes of `layout` have of a dimension of `size`.
fn most_boxes(layout: &DimLayout, size: u64, coordinates: u64) -> u64 {
    let blocks = layout.digits().iter().fold(1_u64, |res, digit| match *digit {
        Digit::Axis(_) => res,
        Digit::Block(n) => res.saturating_mul(n.into()),
    });
    coordinates.saturating_mul(blocks.min(size))
}

/// What is wrong with the boxes of an entry.
fn coverage<'a>(seen: &mut Seen<'a>, mesh: &Mesh, entry: &'a Entry) -> Option<String> {
    for (dim, (layout, &size)) in entry.sharding.dims.iter().zip(&entry.ty.shape).enumerate() {
        if !seen.dims.insert((layout, size)) {
            continue;
        }
        let coordinates = mesh.set_size(layout.axis_set());
        if !seen.enumerates(coordinates, most_boxes(layout, size, coordinates)) {
            seen.too_fine += 1;
            continue;
        }
        let origin = mesh.coord_of(0);
        let mut runs: Vec<(u64, u64)> = mesh
            .group_of(layout.axis_set(), &origin)
            .flat_map(|it| layout.runs(size, mesh, &it))
            .filter(|it| it.1 > 0)
            .collect();
        runs.sort_unstable();
        seen.boxes += runs.len() as u64;
        let mut covered = 0;
        for (start, len) in runs {
            if start != covered {
                let what = if start < covered { "twice" } else { "by no coordinate" };
                let at = start.min(covered);
                return Some(format!("element {at} of dim {dim} is written {what}"));
            }
            covered += len;
        }
        if covered != size {
            return Some(format!("element {covered} of dim {dim} is written by no coordinate"));
        }
    }
    let sharded = entry.sharding.sharded_axes();
    if !seen.owners.insert(sharded) {
        return None;
    }
    if !seen.enumerates(mesh.n_ranks(), 0) {
        seen.too_many += 1;
        return None;
    }
    let mut owners = vec![0_u32; mesh.set_size(sharded) as usize];
    for coord in mesh.coords().filter(|it| entry.sharding.owns(it, mesh, entry.salt)) {
        owners[mesh.index_in(sharded, &coord) as usize] += 1;
    }
    let shard = owners.iter().position(|it| *it != 1)?;
    Some(format!("shard {shard} is written by {} coordinates", owners[shard]))
}

/// States that are not saved are made anew by `prepare`, or zero between steps.
fn left_out(cx: &mut Cx<'_>, flow: &Flow, layout: &CheckpointLayout) {
    let plan = cx.plan;
    let mut saved: SecondaryMap<Buffer, bool> = SecondaryMap::new();
    for entry in &layout.entries {
        if let Source::Buffer(it) = entry.source {
            saved[it] = true;
        }
    }
    let kept = plan.buffers.iter().filter(|it| matches!(it.1.role, Role::Param | Role::State));
    let missing: Vec<Buffer> = kept.map(|it| it.0).filter(|&it| !saved[it]).collect();
    for buffer in missing {
        let prepared = flow.write_in(buffer, PlanSection::Prepare).is_some();
        let reset = flow
            .write_in(buffer, PlanSection::Update)
            .is_some_and(|it| super::states::is_zero(plan, flow, it, buffer));
        if !(prepared || reset) {
            let message = "outlives a step, is not saved, and nothing makes it anew".into();
            cx.buffer(PROPERTY, buffer, message);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Phase;
    use crate::plan::ALIGN;
    use crate::text::parse_plan;
    use crate::verify::plan::prove;

    /// Proves a plan on `dp` ranks of parameters that only have a size and a layout; its counts of checkpoints.
    #[track_caller]
    fn counts(dp: u32, params: &[(u64, &str)]) -> Vec<(&'static str, u64)> {
        let mut text =
            format!("plan @p phase=scheduled mesh=(dp={dp}) {{\n  stream s0 = compute\n");
        for (i, (size, layout)) in params.iter().enumerate() {
            text += &format!("  buffer %w{i} : f32[{size}] @ [{layout}] param\n");
        }
        (0..params.len()).for_each(|it| text += &format!("  param %w{it}\n"));
        let mut plan = parse_plan(&(text + "}\n")).unwrap_or_else(|it| panic!("{it}"));
        for buffer in plan.buffers.keys().collect::<Vec<_>>() {
            plan.buffers[buffer].offset = Some(plan.persistent_bytes);
            plan.persistent_bytes += plan.local_bytes(buffer).next_multiple_of(ALIGN);
        }
        plan.phase = Phase::Planned;
        let proof = prove(&plan);
        assert_eq!(proof.counterexample(PROPERTY), None);
        let found = proof.checked.into_iter().find(|it| it.property == PROPERTY);
        found.expect("it is checked").counts
    }

    #[track_caller]
    fn count(counts: &[(&'static str, u64)], name: &str) -> u64 {
        counts.iter().find(|it| it.0 == name).expect("it is counted").1
    }

    #[test]
    fn a_cut_into_many_blocks_is_not_enumerated() {
        let found = counts(2, &[(1 << 40, "x1073741824.dp"), (1 << 20, "x4.dp")]);
        assert_eq!(count(&found, "cuts too fine to enumerate"), 1);
        assert_eq!(count(&found, "boxes along them"), 8);
    }

    #[test]
    fn many_fine_cuts_are_enumerated_up_to_a_limit() {
        let params: Vec<(u64, &str)> = (1..=40).map(|it| (it << 17, "dp")).collect();
        let found = counts(1 << 17, &params);
        assert_eq!(count(&found, "boxes along them"), 31 << 17);
        assert_eq!(count(&found, "cuts too fine to enumerate"), 9);
        assert_eq!(count(&found, "kinds over too many coordinates to ask"), 0);
    }
}
