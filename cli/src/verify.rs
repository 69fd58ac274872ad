//! `planc verify`: proves a plan, and says what was checked; or what does not hold, with a counterexample.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use ir::Digest;
use ir::plan::Plan;
use ir::verify::{Counts, NOT_PROVED, Proof, Property};
use serde::{Serialize, Serializer};
use serde_json::Value;

use crate::input::{File, Input, ModelArgs};
use crate::output::{ForceArgs, Format, Output};
use crate::report::{Failure, Outcome, Ui, print_view};
use crate::table::{WIDTH, grouped, wrapped};
use crate::words::{digests_text, mesh_text};

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
    /// A certificate that the plan must be the plan of: all that it says is compared.
    #[arg(long, value_name = "FILE")]
    certificate: Option<PathBuf>,
    /// Write what was proved into a file, as JSON; nothing is written unless all holds.
    #[arg(long, value_name = "FILE")]
    write_certificate: Option<PathBuf>,
    #[command(flatten)]
    force: ForceArgs,
}

/// What was proved of a plan.
#[derive(Serialize)]
struct Certificate<'a> {
    planc: &'static str,
    plan: &'a str,
    mesh: Vec<(&'a str, u32)>,
    coordinates: u64,
    /// The digest of its model; null of a plan that was written without one.
    model: Option<Digest>,
    /// The digest of the plan.
    digest: Digest,
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
            let compiled = codegen::compile(*graph, &file.options(&args.model));
            compiled.map_err(|it| file.pass_failure(&it.error))?.plan.into_plan()
        }
    };
    let proof = codegen::prove(&plan);
    let certificate = Certificate::of(&plan, &proof);
    // A certificate that is compared is read before anything is written.
    let expected = args.certificate.as_deref().map(Expected::read).transpose()?;
    if let Some(path) = args.write_certificate.as_ref().filter(|_| certificate.holds) {
        let (flag, format) = ("--write-certificate", Format::Certificate);
        let file = Output { flag, path, format, force: args.force.force };
        file.check([&args.input].into_iter().chain(&args.certificate).map(PathBuf::as_path))?;
        let text = serde_json::to_string_pretty(&certificate)
            .map_err(|it| Failure::bug(format!("cannot write JSON: {it}")))?;
        file.write(&(text + "\n"))?;
    }
    if !ui.quiet {
        print_view(ui, &certificate, Certificate::text)?;
    }
    file.check_proof(&proof)?;
    file.tell_edited(&plan, ui);
    expected.map_or(Ok(()), |it| it.check(&certificate))
}

/// The number of differing facts that an error names.
const MAX_FACTS: usize = 6;

/// A certificate to compare with.
struct Expected<'a> {
    path: &'a Path,
    facts: Value,
}

impl Expected<'_> {
    fn read(path: &Path) -> Outcome<Expected<'_>> {
        let file = File::read(path)?;
        let facts: Value = serde_json::from_str(&file.text).unwrap_or_default();
        if facts["digest"].is_string() && facts["holds"] == true {
            return Ok(Expected { path, facts });
        }
        Err(Failure::new("PL0655", "this is no certificate of a plan")
            .in_file(path)
            .help("`--write-certificate` writes one"))
    }

    /// An error unless it says of the plan what `certificate` says.
    fn check(&self, certificate: &Certificate) -> Outcome {
        let now = serde_json::to_value(certificate)
            .map_err(|it| Failure::bug(format!("cannot write JSON: {it}")))?;
        let (then, now) = (facts(&self.facts), facts(&now));
        let text = |it: Option<&Value>| it.map_or("absent".to_string(), Value::to_string);
        let names = then.keys().chain(now.keys().filter(|it| !then.contains_key(*it)));
        let mut differing: Vec<String> = names
            .filter(|it| then.get(*it) != now.get(*it))
            .map(|it| {
                format!("`{it}` is {}, and of this plan {}", text(then.get(it)), text(now.get(it)))
            })
            .collect();
        if differing.is_empty() {
            return Ok(());
        }
        let (message, help) = if then.get("digest") == now.get("digest") {
            (
                "the certificate was edited: it is of this plan, and does not say what is proved of it",
                "prove the plan again with `--write-certificate`",
            )
        } else if then.get("model") == now.get("model") && now["model"].is_string() {
            (
                "the certificate is of another plan of the same model",
                "compile as then (options, mesh and version of planc), or write a certificate of this \
                 plan with `--write-certificate`",
            )
        } else {
            (
                "the certificate is of another plan",
                "name the plan that it was written for, or write a certificate of this plan with \
                 `--write-certificate`",
            )
        };
        let more = differing.len().saturating_sub(MAX_FACTS);
        differing.truncate(MAX_FACTS);
        if more > 0 {
            differing.push(format!("and {more} more facts differ"));
        }
        let message = format!("{message}: {}", differing.join("; "));
        Err(Failure::new("PL0655", message).in_file(self.path).help(help))
    }
}

/// The facts in a certificate by name, as in `properties.races.checked.accesses`. The version of planc is none: each
/// version proves a plan anew.
fn facts(certificate: &Value) -> BTreeMap<String, Value> {
    fn add(name: &str, value: &Value, res: &mut BTreeMap<String, Value>) {
        let of =
            |part: &str| if name.is_empty() { part.to_string() } else { format!("{name}.{part}") };
        match value {
            Value::Object(fields) => fields.iter().for_each(|(key, it)| add(&of(key), it, res)),
            Value::Array(items) if items.iter().any(Value::is_object) => {
                for (i, it) in items.iter().enumerate() {
                    let part = it["property"].as_str().map_or(i.to_string(), str::to_string);
                    let key = of(&part);
                    // Of two lines for one property, none hides the other.
                    let key = if res.contains_key(&format!("{key}.property")) {
                        format!("{key}.{i}")
                    } else {
                        key
                    };
                    add(&key, it, res);
                }
            }
            it => _ = res.insert(name.to_string(), it.clone()),
        }
    }
    let mut res = BTreeMap::new();
    add("", certificate, &mut res);
    res.remove("planc");
    res
}

impl Certificate<'_> {
    fn of<'a>(plan: &'a Plan, proof: &Proof) -> Certificate<'a> {
        Certificate {
            planc: env!("CARGO_PKG_VERSION"),
            plan: &plan.name,
            mesh: plan.mesh.user_axes(),
            coordinates: plan.mesh.n_ranks(),
            model: plan.model,
            digest: Digest::of_plan(plan),
            holds: proof.broken.is_empty(),
            properties: Property::ALL.iter().map(|&it| Line::of(it, proof)).collect(),
            not_proved: NOT_PROVED,
            title: format!("{} on {}", plan.name, mesh_text(&plan.mesh)),
        }
    }

    fn text(&self) -> String {
        let mut res = format!("{}\n{}", self.title, digests_text(self.model, self.digest));
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
