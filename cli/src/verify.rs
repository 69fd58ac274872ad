//! `planc verify`: proves a plan, and says what was checked; or what does not hold, with a counterexample.

use std::path::PathBuf;

use ir::plan::Plan;
use ir::random::stream_key;
use ir::text::print_plan;
use ir::verify::{Counts, NOT_PROVED, Proof, Property};
use serde::{Serialize, Serializer};

use crate::input::{self, File, Input, ModelArgs};
use crate::report::{Failure, Outcome, Ui, print_view};
use crate::table::{WIDTH, grouped, wrapped};
use crate::words::mesh_text;

/// Proves that a plan is right, without running it.
///
/// Prints each property with what was checked for it. Exit code 1 and a counterexample, if one does not
/// hold. `docs/verification.md` says what they mean.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// A plan, or a model with `--mesh`.
    #[arg(value_name = "MODEL.plan|MODEL.ron")]
    input: PathBuf,
    #[command(flatten)]
    model: ModelArgs,
    /// Write what was proved into a file, as JSON; nothing is written unless all holds.
    #[arg(long, value_name = "FILE")]
    certificate: Option<PathBuf>,
}

/// What was proved of a plan.
#[derive(Serialize)]
struct Certificate<'a> {
    planc: &'static str,
    plan: &'a str,
    mesh: Vec<(&'a str, u32)>,
    coordinates: u64,
    /// FNV-1a of the plan's text: tells plans apart.
    digest: String,
    holds: bool,
    properties: Vec<Line>,
    not_proved: &'static str,
    #[serde(skip)]
    title: String,
}

#[derive(Serialize)]
struct Line {
    property: Property,
    claim: &'static str,
    /// Absent where another property is broken that it builds on.
    holds: Option<bool>,
    #[serde(serialize_with = "as_map")]
    checked: Counts,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    counterexamples: Vec<String>,
}

/// Runs the command.
pub fn run(args: &Args, ui: &Ui) -> Outcome {
    let file = File::read(&args.input)?;
    let plan = match file.unproved(&args.model)? {
        Input::Plan(plan) => plan,
        Input::Graph(graph, _) => {
            let compiled = codegen::compile(graph, &args.model.options());
            compiled.map_err(|it| file.pass_failure(&it.error))?.plan.into_plan()
        }
    };
    let proof = codegen::prove(&plan);
    let certificate = Certificate::of(&plan, &proof);
    if let Some(path) = args.certificate.as_ref().filter(|_| certificate.holds) {
        input::check_output("--certificate", path, &args.input)?;
        let text = serde_json::to_string_pretty(&certificate)
            .map_err(|it| Failure::bug(format!("cannot write JSON: {it}")))?;
        input::write(path, &(text + "\n"))?;
    }
    if !ui.quiet {
        print_view(ui, &certificate, Certificate::text)?;
    }
    file.check_proof(&proof)
}

impl Certificate<'_> {
    fn of<'a>(plan: &'a Plan, proof: &Proof) -> Certificate<'a> {
        Certificate {
            planc: env!("CARGO_PKG_VERSION"),
            plan: &plan.name,
            mesh: plan.mesh.user_axes(),
            coordinates: plan.mesh.n_ranks(),
            digest: format!("{:016x}", stream_key(&print_plan(plan))),
            holds: proof.broken.is_empty(),
            properties: Property::ALL.iter().map(|&it| Line::of(it, proof)).collect(),
            not_proved: NOT_PROVED,
            title: format!("{} on {}", plan.name, mesh_text(&plan.mesh)),
        }
    }

    fn text(&self) -> String {
        let mut res = format!("{}\n", self.title);
        for line in &self.properties {
            let verdict = match line.holds {
                Some(true) => "holds",
                Some(false) => "BROKEN",
                None => "-",
            };
            res.push_str(&format!("\n{verdict:<8}{:<15}{}\n", line.property.name(), line.claim));
            let counts: Vec<String> =
                line.checked.iter().map(|(what, n)| format!("{} {what}", grouped(*n))).collect();
            for text in wrapped(&counts.join(", "), WIDTH - 23) {
                res.push_str(&format!("{:23}{text}\n", ""));
            }
        }
        let n = self.properties.iter().filter(|it| it.holds == Some(true)).count();
        let all = self.properties.len();
        let what = if self.holds { "all" } else { "" };
        res.push_str(&format!(
            "\n{}\n",
            format!("{what} {n} of {all} properties hold").trim_start()
        ));
        for text in wrapped(&format!("not proved: {NOT_PROVED}"), WIDTH) {
            res.push_str(&format!("{text}\n"));
        }
        res
    }
}

impl Line {
    fn of(property: Property, proof: &Proof) -> Line {
        let checked = proof.checked.iter().filter(|it| it.property == property);
        let broken = proof.broken.iter().filter(|it| it.property == Some(property));
        let counterexamples: Vec<String> = broken.map(|it| it.to_string()).collect();
        let mut res = Line {
            property,
            claim: property.claim(),
            holds: (!counterexamples.is_empty()).then_some(false),
            checked: Vec::new(),
            counterexamples,
        };
        for it in checked {
            res.holds = res.holds.or(Some(true));
            res.checked.extend(&it.counts);
        }
        res
    }
}

/// As a map, in order.
fn as_map<S: Serializer>(counts: &Counts, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(counts.iter().copied())
}
