//! Over which ranks the scales of a plan's GEMMs agree, and why.

use ir::amax::{Reason, ScaledGemm, ScaledOperand, ScalingKind, scaled_gemms};
use ir::placement::AxisSet;
use ir::plan::Plan;
use ir::quant::{Format, GemmRole, Role};
use serde::Serialize;

use crate::table::{elided, grouped, plural, wrapped};
use crate::words::fold;

/// One GEMM; its JSON form is part of `--format json`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GemmView {
    /// What it makes.
    pub gemm: String,
    pub role: &'static str,
    pub operands: Vec<OperandView>,
}

/// What it multiplies.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct OperandView {
    /// `x`, `w` or `dy`.
    pub role: &'static str,
    pub tensor: String,
    pub format: Format,
    pub scaling: &'static str,
    /// The user's axes, or parts of them.
    pub group: Option<GroupView>,
    /// Axes over which scales vary.
    pub varies: String,
    pub reason: String,
}

/// Ranks over which an amax is reduced.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GroupView {
    pub axes: String,
    /// How many ranks are in it.
    pub ranks: u64,
}

/// All GEMMs on codes.
pub fn amaxes(plan: &Plan) -> Vec<GemmView> {
    scaled_gemms(plan).into_iter().map(|it| GemmView::of(plan, it)).collect()
}

/// The list, layers folded.
pub fn amaxes_text(list: &[GemmView]) -> String {
    if list.is_empty() {
        return "\nNo GEMM multiplies codes: no module has a recipe.\n".to_string();
    }
    folded(list).iter().map(|(count, it)| format!("\n{}", it.text(*count))).collect()
}

/// The list with `*` for the numbers of layers, and how many GEMMs each entry stands for.
pub fn folded(list: &[GemmView]) -> Vec<(u64, GemmView)> {
    let mut res: Vec<(u64, GemmView)> = Vec::new();
    for it in list {
        let it = it.folded();
        match res.iter_mut().find(|known| known.1 == it) {
            Some(known) => known.0 += 1,
            None => res.push((1, it)),
        }
    }
    res
}

impl GemmView {
    fn of(plan: &Plan, gemm: ScaledGemm) -> GemmView {
        let role = match gemm.role {
            GemmRole::Fprop => "fprop",
            GemmRole::Dgrad => "dgrad",
            GemmRole::Wgrad => "wgrad",
        };
        let operands = gemm.operands.into_iter().map(|it| OperandView::of(plan, it)).collect();
        GemmView { gemm: gemm.name, role, operands }
    }

    /// With `*` for the numbers of layers.
    fn folded(&self) -> GemmView {
        let mut res = self.clone();
        res.gemm = fold(&res.gemm);
        res.operands.iter_mut().for_each(|it| it.tensor = fold(&it.tensor));
        res
    }

    fn text(&self, count: u64) -> String {
        let times = if count == 1 { String::new() } else { format!(", {} times", grouped(count)) };
        let mut res = format!("{}  {}{times}\n", elided(&self.gemm, 60), self.role);
        for it in &self.operands {
            res.push_str(&format!("  {:<3}{}\n", it.role, elided(&it.tensor, 72)));
            for line in wrapped(&it.text(), 74) {
                res.push_str(&format!("     {line}\n"));
            }
        }
        res
    }
}

impl OperandView {
    fn of(plan: &Plan, operand: ScaledOperand) -> OperandView {
        let names = |axes: AxisSet| plan.mesh.in_user_axes(&plan.mesh.names(axes), ", ");
        let group =
            GroupView { axes: names(operand.group), ranks: plan.mesh.set_size(operand.group) };
        let reason = match operand.reason {
            Reason::Sharded if operand.varies.is_empty() => {
                format!("sharded over {}, and one weight", names(operand.group))
            }
            Reason::Sharded => format!(
                "sharded over {}, of which weight_mesh leaves out {}",
                names(operand.group.union(operand.varies)),
                names(operand.varies)
            ),
            Reason::Gathered { codes, before, uneven } => {
                let quantized = match operand.scaling {
                    ScalingKind::NvFp4 => "once it is rounded (sequence parallelism)",
                    ScalingKind::Current | ScalingKind::Delayed | ScalingKind::Block => {
                        "in FP8 (sequence parallelism)"
                    }
                };
                let parts = [
                    (codes, "gathered over", quantized),
                    (before, "gathered over", "before it is quantized"),
                    (uneven, "over", "it is not in equal pieces"),
                ];
                let parts = parts.into_iter().filter(|it| !it.0.is_empty());
                let text = |(axes, verb, what)| format!("{verb} {} {what}", names(axes));
                parts.map(text).collect::<Vec<_>>().join(", ")
            }
            Reason::History => "history: one state over all axes that shard it".to_string(),
            Reason::Nothing if operand.varies.is_empty() => "every rank has all of it".to_string(),
            Reason::Nothing => "multiplied where it is made".to_string(),
            Reason::Blocks { codes, before, rounded } => {
                let cut = if rounded { ", cut between blocks" } else { "" };
                let parts =
                    [(codes, format!("in FP8{cut}")), (before, "before it is quantized".into())];
                let parts = parts.into_iter().filter(|it| !it.0.is_empty());
                let gathered = parts.map(|it| format!("; gathered over {} {}", names(it.0), it.1));
                format!("block scales need no amax of the tensor{}", gathered.collect::<String>())
            }
        };
        OperandView {
            role: match operand.role {
                Role::Input => "x",
                Role::Weight => "w",
                Role::Grad => "dy",
            },
            tensor: operand.tensor,
            format: operand.format,
            scaling: operand.scaling.name(),
            group: (operand.scaling != ScalingKind::Block && !operand.group.is_empty())
                .then_some(group),
            varies: names(operand.varies),
            reason,
        }
    }

    fn text(&self) -> String {
        let group = match &self.group {
            Some(group) => {
                format!("{} over {} ({})", self.scaling, group.axes, plural(group.ranks, "rank"))
            }
            None => format!("{} over no axis", self.scaling),
        };
        let group = if self.scaling == ScalingKind::Block.name() {
            self.scaling.to_string()
        } else {
            group
        };
        let varies = match self.varies.as_str() {
            "" => String::new(),
            axes => format!("; the scale varies over {axes}"),
        };
        format!("{:?}, {group}: {}{varies}", self.format, self.reason)
    }
}
