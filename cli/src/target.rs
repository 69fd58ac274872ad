//! `--target`, and what a plan is predicted to need and to take there.

use std::path::Path;

use ir::cost::{StepCost, Target, Timeline};
use ir::plan::{Plan, memory_profile};
use serde::ser::SerializeStruct;
use serde::{Serialize, Serializer};

use crate::input;
use crate::report::{Failure, Outcome};

/// The profile that comes with planc under this name, or the one in this file.
pub fn load(name: &str) -> Outcome<Target> {
    if let Some(target) = Target::builtin(name) {
        return Ok(target);
    }
    let known = Target::NAMES.join(", ");
    let path = Path::new(name);
    // `/dev/stdin` and `<(..)` of a shell are files too.
    if path.extension().is_none_or(|it| it != "ron") && !name.contains('/') {
        return Err(Failure::new("PL0650", format!("there is no target `{name}`"))
            .help(format!("one of {known}, or a profile of your own, as in `--target my.ron`")));
    }
    let text = input::text(path, &format!("one of {known}, or a profile of your own"))?;
    Target::parse(&text).map_err(|it| {
        let failure = Failure::new("PL0651", format!("`{name}` is no profile of a target: {it}"))
            .help("ir/profiles/h200.ron has all fields, with what they mean in docs/cost.md");
        match it.span(&text) {
            Some(span) => failure.at(path, &text, span),
            None => failure,
        }
    })
}

/// Bytes as in `140GiB`, `80GB`, `80G`, `141e9`; a number without a unit is in bytes and must be at least 1 MiB.
/// Case does not matter, and `80G` is 80 GiB, as for Slurm, Docker and `ulimit`.
pub fn size(text: &str) -> Result<u64, String> {
    let text = text.trim();
    // A unit starts with a letter; so does no number but for its exponent.
    let exponent = |i: usize| {
        let behind = text[i + 1..].starts_with(|it: char| it.is_ascii_digit() || "+-".contains(it));
        matches!(&text[i..=i], "e" | "E") && behind
    };
    let unit_at = text.char_indices().find(|it| it.1.is_alphabetic() && !exponent(it.0));
    let (number, unit) = text.split_at(unit_at.map_or(text.len(), |it| it.0));
    let factor = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 1.0,
        "kb" => 1e3,
        "mb" => 1e6,
        "gb" => 1e9,
        "tb" => 1e12,
        "k" | "ki" | "kib" => 1024.0,
        "m" | "mi" | "mib" => 1024.0 * 1024.0,
        "g" | "gi" | "gib" => 1024.0 * 1024.0 * 1024.0,
        "t" | "ti" | "tib" => 1024.0 * 1024.0 * 1024.0 * 1024.0,
        _ => return Err(format!("`{unit}` is no unit; write GiB, GB, MiB, MB or none for bytes")),
    };
    let number: f64 = number.trim().parse().map_err(|_| format!("`{number}` is no number"))?;
    let bytes = number * factor;
    if !(0.0..1e18).contains(&bytes) {
        return Err("a size is 0 or more, and less than an exabyte".into());
    }
    // Nobody has so little, but units are forgotten.
    if unit.is_empty() && bytes < 1024.0 * 1024.0 {
        return Err(format!("without a unit this is bytes; write `{number}GiB`, or `{number}B`"));
    }
    Ok(bytes as u64)
}

/// Bytes that a rank needs. Only their sum is compared with a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Needs {
    /// Bytes of the plan: both arenas and scratch.
    pub planned_bytes: u64,
    /// Bytes beside the plan: context, modules and communicators. 0 without a target.
    pub beside_bytes: u64,
}

impl Needs {
    /// Of a plan.
    pub fn of(plan: &Plan, target: Option<&Target>) -> Needs {
        Needs {
            planned_bytes: memory_profile(plan).total_bytes(),
            beside_bytes: target.map_or(0, |it| it.bytes_beside_plan(plan.meeting_comms().len())),
        }
    }

    /// The sum, which decides whether a plan fits.
    pub fn bytes(self) -> u64 {
        self.planned_bytes.saturating_add(self.beside_bytes)
    }
}

impl Serialize for Needs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut res = serializer.serialize_struct("Needs", 3)?;
        res.serialize_field("planned_bytes", &self.planned_bytes)?;
        res.serialize_field("beside_bytes", &self.beside_bytes)?;
        res.serialize_field("needs_bytes", &self.bytes())?;
        res.end()
    }
}

/// What a step of a plan is predicted to take.
#[derive(Debug, Clone, Serialize)]
pub struct Prediction {
    /// Where.
    pub target: String,
    /// Times.
    #[serde(flatten)]
    pub cost: StepCost,
    /// Tokens a second and rank.
    pub tokens_per_second: f64,
    /// A sentence: how many figures of the profile were measured, and what of this mesh was not.
    pub basis: String,
}

/// Says how many figures of a profile were measured, and which parts of a mesh of `ranks` ranks were not.
pub fn basis(target: &Target, ranks: u64) -> String {
    let (sources, name) = (target.sources(), &target.name);
    let measured = sources.iter().filter(|it| it.is_measured()).count();
    let mut res = match measured {
        0 => format!("no figure of {name} was measured: data sheets, derived, assumed"),
        n => format!("{n} of {} figures of {name} were measured", sources.len()),
    };
    let between_nodes = ranks > u64::from(target.ranks_per_node);
    let unknown = [
        (ranks > 2 && !target.hops.source.is_measured(), "groups of more than 2 ranks"),
        (between_nodes && !target.network.1.is_measured(), "links between nodes"),
    ];
    let unknown: Vec<&str> = unknown.iter().filter(|it| it.0).map(|it| it.1).collect();
    if measured > 0 && !unknown.is_empty() {
        res += &format!("; not measured: {}", unknown.join(", "));
    }
    res
}

impl Prediction {
    /// Of a plan; an error if it has GEMMs that the target does not.
    pub fn of(plan: &Plan, target: &Target) -> Outcome<Prediction> {
        if !target.multiplies(plan) {
            let message = format!("`{}` multiplies in FP8, and {} cannot", plan.name, target.name);
            return Err(Failure::new("PL0653", message)
                .help("leave the recipe out with `--set recipe=Bf16`, or name another target"));
        }
        let cost = Timeline::predict(plan, target).step_cost(plan, target);
        let tokens = (plan.run.global_batch * plan.run.sequence) as f64;
        let tokens_per_second = tokens / cost.seconds / plan.mesh.n_ranks() as f64;
        let basis = basis(target, plan.mesh.n_ranks());
        Ok(Prediction { target: target.name.clone(), cost, tokens_per_second, basis })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, expect: Result<u64, &str>) {
        assert_eq!(size(text), expect.map_err(str::to_string));
    }

    #[test]
    fn sizes_have_units() {
        check("140GiB", Ok(150_323_855_360));
        check("80GB", Ok(80_000_000_000));
        check("80 GB", Ok(80_000_000_000));
        check("141e9", Ok(141_000_000_000));
        check("1.5e1MiB", Ok(15 << 20));
        check("512B", Ok(512));
        check("1048576", Ok(1 << 20));
        check("80", Err("without a unit this is bytes; write `80GiB`, or `80B`"));
        for text in ["80G", "80g", "80GiB", "80gib", "80Gi", "80 G"] {
            check(text, Ok(80 << 30));
        }
        for text in ["80gb", "80e9", "80Gb"] {
            check(text, Ok(80_000_000_000));
        }
        check("512M", Ok(512 << 20));
        check("2T", Ok(2 << 40));
        check("140gbit", Err("`gbit` is no unit; write GiB, GB, MiB, MB or none for bytes"));
        check("GiB", Err("`` is no number"));
        check("-1GB", Err("a size is 0 or more, and less than an exabyte"));
        check("1e30", Err("a size is 0 or more, and less than an exabyte"));
    }
}
