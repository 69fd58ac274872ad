//! What `planc run --compare cpu` says: how far each instruction is from the CPU's, and which differs.

use std::collections::BTreeMap;
use std::sync::mpsc::Receiver;

use ir::plan::{Plan, PlanSection};
use runtime::backend::compare::Comparison;
use runtime::bind;
use serde_json::json;

use crate::report::{Failure, Format, Outcome, print};
use crate::table::{Align, Table, plural};

/// How many instructions the report lists, of those that are furthest from the CPU's.
const LISTED: usize = 12;

/// Prints the report, if there is a format for it; fails if a result of a rank of this process differs.
pub fn report(plan: &Plan, comparisons: &Receiver<Comparison>, format: Option<Format>) -> Outcome {
    let all: Vec<Comparison> = comparisons.try_iter().collect();
    // In the order of the run, on whichever rank it shows first.
    let first = all.iter().find(|it| it.differs());
    match format {
        None => (),
        Some(Format::Text) => print(&text(plan, &all)),
        Some(Format::Json) => all.iter().for_each(|it| print(&format!("{}\n", as_json(plan, it)))),
    }
    let Some(first) = first else { return Ok(()) };
    let message = format!(
        "rank {}: {} differs from the CPU's: `{}` by {:.1e}, and {:.0e} is allowed",
        first.rank,
        name(plan, first),
        plan.buffers[first.buffer].name,
        first.error,
        first.tolerance
    );
    Err(Failure::new("PL0632", message)
        .help("`planc doctor --check` shows whether the op is wrong by itself"))
}

fn name(plan: &Plan, it: &Comparison) -> String {
    it.at.map_or("the initial weight".to_string(), |at| bind::describe(plan, at))
}

fn text(plan: &Plan, all: &[Comparison]) -> String {
    let params = all.iter().filter(|it| it.at.is_none());
    let equal = params.clone().filter(|it| !it.differs()).count();
    let mut worst: BTreeMap<(PlanSection, usize), &Comparison> = BTreeMap::new();
    for it in all {
        let Some(at) = it.at else { continue };
        let known = worst.entry((at.section, at.index)).or_insert(it);
        // NaN is the worst, and `total_cmp` puts it last.
        if it.error.total_cmp(&known.error).is_gt() {
            *known = it;
        }
    }
    let mut res = format!(
        "compared with the CPU: {} of {} equal bit for bit; {}\n",
        equal,
        plural(params.count() as u64, "initial weight"),
        plural(worst.len() as u64, "instruction"),
    );
    let mut order: Vec<&Comparison> = worst.into_values().collect();
    order.sort_by(|a, b| (b.error / b.tolerance).total_cmp(&(a.error / a.tolerance)));
    let mut table = Table::new(2, &[Align::Right, Align::Left]);
    for it in order.iter().take(LISTED) {
        table.row([format!("{:.1e}", it.error), name(plan, it)]);
    }
    res.push_str(&table.text());
    res
}

fn as_json(plan: &Plan, it: &Comparison) -> serde_json::Value {
    json!({
        "instruction": name(plan, it),
        "rank": it.rank,
        "buffer": plan.buffers[it.buffer].name,
        "error": it.error,
        "tolerance": it.tolerance,
        "differs": it.differs(),
    })
}
