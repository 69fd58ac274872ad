//! What a step sends, and what is in memory.

use cranelift_entity::SecondaryMap;
use ir::plan::{Buffer, Instruction, MemoryProfile, Part, Plan, PlanSection, Role, memory_profile};
use ir::summary::traffic;
use serde::Serialize;

use crate::table::{Align, Table, WIDTH, bytes, elided, wrapped};
use crate::words::describe;

/// One collective of a section.
#[derive(Debug, Serialize)]
pub struct CollectiveView {
    section: PlanSection,
    /// The index in the section, from 0.
    instruction: usize,
    kind: &'static str,
    over: String,
    /// All-gather counts its output, the others their input.
    bytes: u64,
    /// Bytes that a rank sends in a ring.
    wire_bytes: u64,
    /// What it makes.
    results: Vec<String>,
    /// The layouts of the first result before and after the collective, and the first op that reads it.
    why: String,
}

/// All collectives of a plan, in order, without those that move nothing between ranks.
pub fn collectives(plan: &Plan) -> Vec<CollectiveView> {
    let mut res = Vec::new();
    let readers = readers(plan);
    for section in PlanSection::ALL {
        for (index, instruction) in plan.section(section).iter().enumerate() {
            let Instruction::Collective { kind, comm, parts, .. } = instruction else { continue };
            if kind.is_local() {
                continue;
            }
            let axes = plan.comms[*comm];
            let (bytes, wire_bytes) = traffic(plan, *kind, axes, parts);
            res.push(CollectiveView {
                section,
                instruction: index,
                kind: kind.name(),
                over: plan.mesh.in_user_axes(&plan.mesh.names(axes), ", "),
                bytes,
                wire_bytes,
                results: parts.iter().map(|it| plan.buffers[it.dst].name.clone()).collect(),
                why: parts.first().map_or(String::new(), |it| {
                    why(plan, it, readers[it.dst].iter().find(|&&at| at > (section, index)))
                }),
            });
        }
    }
    res
}

/// The layouts before and after a collective, and the reader that needs the second one: `[tp.dp, _] -> [tp, _] for
/// `matmul` making `h``.
fn why(plan: &Plan, part: &Part, reader: Option<&(PlanSection, usize)>) -> String {
    let layout = |it: Buffer| {
        let text = plan.buffers[it].sharding.display(&plan.mesh).to_string();
        plan.mesh.in_user_axes(&text, ".")
    };
    let reader = match reader {
        Some(&(section, index)) => format!("for {}", describe(plan, section, index)),
        None => "kept for the next step".to_string(),
    };
    format!("{} -> {}, {reader}", layout(part.src), layout(part.dst))
}

/// The instructions that read each buffer, in running order.
fn readers(plan: &Plan) -> SecondaryMap<Buffer, Vec<(PlanSection, usize)>> {
    let mut res: SecondaryMap<Buffer, Vec<(PlanSection, usize)>> = SecondaryMap::new();
    for section in PlanSection::ALL {
        for (index, instruction) in plan.section(section).iter().enumerate() {
            instruction.reads().into_iter().for_each(|it| res[it].push((section, index)));
        }
    }
    res
}

/// The list, as a table; below each line, what the collective makes, and why it is there.
pub fn collectives_text(list: &[CollectiveView]) -> String {
    let mut table =
        Table::new(0, &[Align::Left, Align::Right, Align::Left, Align::Left, Align::Right]);
    table.row(["section", "no.", "kind", "over", "bytes"].map(str::to_string));
    for it in list {
        table.row([
            it.section.name().to_string(),
            (it.instruction + 1).to_string(),
            it.kind.to_string(),
            it.over.clone(),
            bytes(it.bytes),
        ]);
    }
    let table = table.text();
    let mut lines = table.lines();
    let mut res = format!("\n{}\n", lines.next().unwrap_or_default());
    for (line, it) in lines.zip(list) {
        res += &format!("{line}\n");
        let more = match it.results.len() {
            0 | 1 => String::new(),
            n => format!(" and {} more", n - 1),
        };
        let first = it.results.first().map_or("", String::as_str);
        for line in wrapped(&format!("{first}{more}: {}", it.why), WIDTH - 4) {
            res += &format!("    {line}\n");
        }
    }
    res
}

/// What is in memory on one rank.
#[derive(Debug, Serialize)]
pub struct MemoryView {
    total_bytes: u64,
    persistent_bytes: u64,
    step_bytes: u64,
    /// Scratch of all streams, on a GPU.
    workspace_bytes: u64,
    /// Bytes of what survives a step, by role.
    kept: Vec<RoleView>,
    peak: Option<PeakView>,
}

#[derive(Debug, Serialize)]
struct RoleView {
    role: Role,
    tensors: u64,
    bytes: u64,
}

#[derive(Debug, Serialize)]
struct PeakView {
    section: PlanSection,
    instruction: usize,
    what: String,
    live_bytes: u64,
    largest: Vec<TensorBytes>,
}

#[derive(Debug, Serialize)]
struct TensorBytes {
    name: String,
    bytes: u64,
}

impl MemoryView {
    /// Counts.
    pub fn of(plan: &Plan) -> MemoryView {
        let profile = memory_profile(plan);
        let kept = [Role::Param, Role::State, Role::Input].map(|role| {
            let of_role = plan.buffers.iter().filter(|it| it.1.role == role);
            let sizes: Vec<u64> = of_role.map(|it| plan.local_bytes(it.0)).collect();
            RoleView { role, tensors: sizes.len() as u64, bytes: sizes.iter().sum() }
        });
        MemoryView {
            total_bytes: profile.total_bytes(),
            persistent_bytes: profile.persistent_bytes,
            step_bytes: profile.step_bytes,
            workspace_bytes: profile.workspace_bytes,
            kept: kept.into_iter().collect(),
            peak: PeakView::of(plan, &profile),
        }
    }

    /// As two tables.
    pub fn text(&self) -> String {
        let mut kept = Table::new(2, &[Align::Left, Align::Right, Align::Right]);
        for it in &self.kept {
            kept.row([it.role.name().to_string(), it.tensors.to_string(), bytes(it.bytes)]);
        }
        let mut res = format!(
            "\n{} a rank, {} of it scratch on a GPU\n\nkept: {}\n{}",
            bytes(self.total_bytes),
            bytes(self.workspace_bytes),
            bytes(self.persistent_bytes),
            kept.text()
        );
        let Some(peak) = &self.peak else { return res };
        res.push_str(&format!(
            "\ntemporary: {}; at the peak {} are live\n  {} {}, {}\n",
            bytes(self.step_bytes),
            bytes(peak.live_bytes),
            peak.section.name(),
            peak.instruction + 1,
            peak.what,
        ));
        let mut largest = Table::new(2, &[Align::Right, Align::Left]);
        for it in &peak.largest {
            largest.row([bytes(it.bytes), elided(&it.name, 60)]);
        }
        res.push_str(&largest.text());
        res
    }
}

impl PeakView {
    fn of(plan: &Plan, profile: &MemoryProfile) -> Option<PeakView> {
        let (section, instruction) = profile.peak?;
        let tensor = |&(buffer, bytes): &(ir::plan::Buffer, u64)| TensorBytes {
            name: plan.buffers[buffer].name.clone(),
            bytes,
        };
        Some(PeakView {
            section,
            instruction,
            what: describe(plan, section, instruction),
            live_bytes: profile.live_bytes,
            largest: profile.largest.iter().map(tensor).collect(),
        })
    }
}
