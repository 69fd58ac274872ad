//! Mutants of real plans: whoever changes what a plan means is refused, with the right reason.
//!
//! Whether a mutant means something else is not asked of the verifier: it is run, on all coordinates and
//! in several orders of streams, and compared bit for bit with the plan that it was made from. The table
//! of `docs/verification.md` is what the test prints; `BLESS=1` writes it there.

#[path = "mutations/interpret.rs"]
mod interpret;
#[path = "mutations/mutate.rs"]
mod mutate;
#[path = "mutations/plans.rs"]
mod plans;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use interpret::{Outcome, Schedule, run};
use ir::plan::Plan;
use ir::verify::Property;
use mutate::{Choices, Kind, mutant};
use plans::{Subject, compiled, subjects};

/// Mutants of each kind of each plan. `MUTANTS=100` looks further, and leaves the table alone.
const MUTANTS: usize = 15;

/// Ways to quantize.
const RECIPES: [&str; 4] =
    ["DelayedScaling()", "Float8CurrentScaling()", "Float8BlockScaling()", "MXFP8BlockScaling()"];

fn n_mutants() -> usize {
    std::env::var("MUTANTS").ok().and_then(|it| it.parse().ok()).unwrap_or(MUTANTS)
}

/// The orders of streams in which a mutant is run.
fn schedules(seed: u64) -> Vec<Schedule> {
    let random = (0..4).map(|it| Schedule::Random(seed * 4 + it));
    [Schedule::CommFirst, Schedule::ComputeFirst, Schedule::Issue]
        .into_iter()
        .chain(random)
        .collect()
}

/// The next number of SplitMix64.
pub(crate) fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

thread_local! {
    /// Mutants may panic, which nobody need read.
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// The first outcome of a mutant that is not that of its plan.
fn difference(plan: &Plan, expect: &Outcome, seed: u64) -> Option<Outcome> {
    schedules(seed).into_iter().map(|it| run(plan, it)).find(|it| it != expect)
}

/// What became of the mutants of one kind.
#[derive(Default)]
struct Row {
    mutants: usize,
    changed: usize,
    refused: usize,
    refused_changed: usize,
    reasons: BTreeMap<Property, usize>,
}

/// All mutants of one plan; complaints come back.
fn judge(subject: &Subject, number: usize) -> (BTreeMap<Kind, Row>, Vec<String>) {
    QUIET.set(true);
    let Subject { name, plan } = subject;
    let expect = run(plan, Schedule::Issue);
    assert!(matches!(expect, Outcome::Done(_)), "{name}: {expect:?}");
    assert_eq!(difference(plan, &expect, 1), None, "{name} depends on the order of streams");
    assert_eq!(codegen::prove(plan).broken, [], "{name}");
    let (mut rows, mut complaints): (BTreeMap<Kind, Row>, Vec<String>) = Default::default();
    for kind in Kind::ALL {
        let row = rows.entry(kind).or_default();
        // Only plans in FP8 reduce amaxes.
        let wanted = match (kind, name.contains("fp8")) {
            (Kind::DropAmax, false) => 0,
            (Kind::DropAmax, true) => 4 * n_mutants(),
            // It takes long, and is like others but for granules.
            _ if name.contains("blocks") && kind != Kind::ChangeGranule => n_mutants() / 3,
            _ => n_mutants(),
        };
        for seed in 0..10 * wanted as u64 {
            if row.mutants == wanted {
                break;
            }
            let seed = (number as u64 * 100 + kind as u64) * 10_000 + seed;
            let Some(mutant) = mutant(plan, kind, &mut Choices(seed)) else { continue };
            row.mutants += 1;
            let difference = difference(&mutant, &expect, seed);
            let broken = codegen::prove(&mutant).broken;
            let reasons = || broken.iter().filter_map(|it| it.property);
            let reason = reasons().find(|it| kind.reasons().contains(it)).or(reasons().next());
            row.changed += usize::from(difference.is_some());
            row.refused += usize::from(reason.is_some());
            let what = || format!("{name}, {} (seed {seed})", kind.name());
            match (difference, reason) {
                (Some(it), None) => {
                    let lines = changed_lines(plan, &mutant);
                    complaints.push(format!("{}: {it:?}, and accepted:\n{lines}", what()));
                }
                (Some(it), Some(reason)) => {
                    row.refused_changed += 1;
                    *row.reasons.entry(reason).or_default() += 1;
                    if !kind.reasons().contains(&reason) {
                        let text = format!("{}: {it:?}, refused: {}", what(), broken[0]);
                        complaints.push(text);
                    }
                }
                (None, Some(reason)) => *row.reasons.entry(reason).or_default() += 1,
                (None, None) => {}
            }
        }
    }
    (rows, complaints)
}

/// The first lines in which two plans differ.
fn changed_lines(plan: &Plan, mutant: &Plan) -> String {
    let (a, b) = (plan.to_string(), mutant.to_string());
    let lines = a.lines().zip(b.lines()).filter(|it| it.0 != it.1).take(3);
    lines.map(|(a, b)| format!("  - {a}\n  + {b}\n")).collect()
}

#[test]
fn mutants_that_mean_something_else_are_refused_with_the_right_reason() {
    let default = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if !QUIET.get() {
            default(info);
        }
    }));
    let subjects = subjects();
    let judged = std::thread::scope(|scope| {
        let judge = |(number, it)| scope.spawn(move || judge(it, number));
        let threads: Vec<_> = subjects.iter().enumerate().map(judge).collect();
        threads.into_iter().map(|it| it.join()).collect::<Vec<_>>()
    });
    let mut rows: BTreeMap<Kind, Row> = BTreeMap::new();
    let mut complaints = Vec::new();
    for (of_plan, its_complaints) in judged.into_iter().map(|it| it.expect("a plan is judged")) {
        complaints.extend(its_complaints);
        for (kind, it) in of_plan {
            let row = rows.entry(kind).or_default();
            row.mutants += it.mutants;
            row.changed += it.changed;
            row.refused += it.refused;
            row.refused_changed += it.refused_changed;
            it.reasons.into_iter().for_each(|it| *row.reasons.entry(it.0).or_default() += it.1);
        }
    }
    let table = table(&rows);
    println!("{table}");
    assert!(complaints.is_empty(), "{} complaints:\n{}", complaints.len(), complaints.join("\n"));
    let mutants: usize = rows.values().map(|it| it.mutants).sum();
    assert!(mutants >= 500, "{mutants} mutants");
    assert!(rows.values().all(|it| it.changed >= 8), "a kind that changes nothing shows nothing");
    if n_mutants() == MUTANTS {
        check_document(&table);
    }
}

fn table(rows: &BTreeMap<Kind, Row>) -> String {
    let mut res = String::from(
        "| mutation | mutants | mean something else | of them refused | refused in all | by |\n\
         |---|---|---|---|---|---|\n",
    );
    let mut sums = [0; 4];
    for (kind, it) in rows {
        let mut reasons: Vec<_> = it.reasons.iter().collect();
        reasons.sort_by_key(|it| std::cmp::Reverse(*it.1));
        let reasons: Vec<String> =
            reasons.iter().map(|it| format!("{} {}", it.0.name(), it.1)).collect();
        let numbers = [it.mutants, it.changed, it.refused_changed, it.refused];
        sums.iter_mut().zip(numbers).for_each(|(sum, it)| *sum += it);
        let [a, b, c, d] = numbers;
        let reasons = reasons.join(", ");
        writeln!(res, "| {} | {a} | {b} | {c} | {d} | {reasons} |", kind.name())
            .expect("a String takes it");
    }
    let [a, b, c, d] = sums;
    res + &format!("| all | {a} | {b} | {c} | {d} | |\n")
}

/// The table in the documentation is this one.
fn check_document(table: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/verification.md");
    let text = std::fs::read_to_string(&path).expect("the documentation is there");
    let start = text.find("| mutation |").expect("it has the table");
    let end = start + text[start..].find("\n\n").expect("text follows") + 1;
    if std::env::var_os("BLESS").is_some() {
        let text = format!("{}{table}{}", &text[..start], &text[end..]);
        return std::fs::write(&path, text).expect("it can be written");
    }
    assert_eq!(&text[start..end], table, "BLESS=1 writes the new table");
}

/// Compiling proves: what is no error of the user must compile.
#[test]
fn every_plan_of_the_examples_is_accepted() {
    let examples: [(&str, &[&str], &[&str]); 8] = [
        ("mlp", &["1", "2", "2x2", "4x2"], &[]),
        ("llama-tiny", &["1", "8", "2x4", "2x2x2", "4x2", "dp_replicate=2,dp_shard=4"], &[]),
        ("llama-tiny-fp8", &["1", "2x4", "2x2x2"], &RECIPES),
        ("llama-tiny-block", &["1", "2x2", "2"], &[]),
        ("gpt2-small", &["1", "2x4", "8"], &[]),
        ("llama3-8b", &["1", "8", "2x4", "64x8"], &["Float8CurrentScaling()", "DelayedScaling()"]),
        ("llama3-70b", &["8x8"], &[]),
        ("llama3-405b", &["2048x8"], &[]),
    ];
    let variants: [&[(&str, &str)]; 3] =
        [&[], &[("checkpoint", "Full")], &[("micro_batches", "2")]];
    let mut n = 0;
    for (name, meshes, recipes) in examples {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../examples/{name}.ron"));
        let source = std::fs::read_to_string(path).expect("an example");
        for (mesh, variant) in meshes.iter().flat_map(|it| variants.map(|variant| (it, variant))) {
            for recipe in std::iter::once(None).chain(recipes.iter().map(Some)) {
                let mut set = variant.to_vec();
                set.extend(recipe.map(|it| ("recipe", *it)));
                match compiled(&source, mesh, &set) {
                    Ok(_) => n += 1,
                    Err(None) => {}
                    Err(Some(bug)) => panic!("{name} on {mesh} with {set:?}: {bug}"),
                }
            }
        }
    }
    println!("{n} plans are accepted");
    assert!(n >= 80, "{n} plans");
}
