//! One named test per file of `tests/filetests`, per `ir` block of `docs/ir.md`, and per example.
//!
//! A file opens with a comment that states one claim. What follows is one of
//!
//! * `; passes: a, b` and a program; below `; ---`, what the passes make of it, or the error with
//!   which they refuse it. `lower` stands for the step from a graph to a plan.
//! * a program with `; error: text` on the lines that the parser or the verifier must refuse.
//! * a program, which must print as it stands.
//!
//! An example is compiled; the program must survive its text form after every pass.
//!
//! `BLESS=1` rewrites what is expected; errors are never rewritten. Every program that is printed must
//! parse back to the same text, and passes must give the same text when run twice.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use ir::plan::Plan;
use ir::text::{self, Program};
use ir::verify::{self, Place, VerifyError};
use libtest_mimic::{Arguments, Failed, Trial};
use passes::{Ir, Pass, PassError, PassManager, PlanMemory, ScheduleOverlap};

/// Stands between the given program and what is expected.
const SEPARATOR: &str = "; ---\n";
/// What is compiled, on meshes that use every part of the text form: refined axes, HSDP, one rank.
const EXAMPLES: [(&str, &str); 6] = [
    ("mlp.ron", "2x4"),
    ("llama-tiny.ron", "1"),
    ("llama-tiny.ron", "2x4"),
    ("llama-tiny.ron", "2x2x2"),
    ("llama-tiny-fp8.ron", "2x2x2"),
    ("llama-tiny-block.ron", "2x2"),
];

fn main() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = root.join("filetests");
    let mut files = Vec::new();
    collect(&folder, &mut files);
    files.sort();
    assert!(!files.is_empty(), "no filetests in {}", folder.display());
    let mut trials: Vec<Trial> = files
        .into_iter()
        .map(|path| {
            let name = path.strip_prefix(&folder).expect("it was found there").to_owned();
            Trial::test(name.display().to_string(), move || file(&path))
        })
        .collect();
    trials.extend(blocks(&root.join("../docs/ir.md")));
    trials.extend(EXAMPLES.map(|(name, mesh)| {
        let path = root.join("../examples").join(name);
        Trial::test(format!("examples/{name} {mesh}"), move || example(&path, mesh))
    }));
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}

fn collect(folder: &Path, into: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("the folder of filetests is readable") {
        let path = entry.expect("its entries are readable").path();
        if path.is_dir() {
            collect(&path, into);
        } else if path.extension().is_some_and(|it| it == "ir" || it == "plan") {
            into.push(path);
        }
    }
}

/// Examples of the documentation: each is a program that prints as it stands.
fn blocks(path: &Path) -> Vec<Trial> {
    let page = fs::read_to_string(path).expect("docs/ir.md is there");
    let mut res = Vec::new();
    let mut rest = page.as_str();
    while let Some(start) = rest.find("```ir\n") {
        let block = &rest[start + "```ir\n".len()..];
        let end = block.find("```").expect("every block is closed");
        let line = page[..page.len() - block.len()].lines().count() + 1;
        let text = block[..end].to_string();
        let test = move || {
            let printed = reprinted(&text)?;
            same(&printed, &without_comments(&text))
        };
        res.push(Trial::test(format!("docs/ir.md:{line}"), test));
        rest = &block[end..];
    }
    assert!(!res.is_empty(), "docs/ir.md has no examples");
    res
}

/// Compiles a model; every dump and the plan must parse back to themselves.
fn example(path: &Path, mesh: &str) -> Result<(), Failed> {
    let model = ir::model::parse(&fs::read_to_string(path)?)?;
    let graph = ir::model::elaborate(&model, &ir::model::MeshSpec::parse(mesh)?)?;
    reprinted(&graph.to_string())?;
    let options = codegen::Options { dump_after: vec!["all".into()], ..Default::default() };
    let compiled = codegen::compile(graph, &options)?;
    for dump in &compiled.dumps {
        same(&reprinted(&dump.text)?, &dump.text)
            .map_err(|it| format!("after {}: {}", dump.pass, it.message().unwrap_or("differs")))?;
    }
    match text::parse_plan(&compiled.plan.to_string())? == *compiled.plan {
        true => Ok(()),
        false => Err("the plan that was parsed is another one".into()),
    }
}

fn file(path: &Path) -> Result<(), Failed> {
    let text = fs::read_to_string(path)?;
    if !text.starts_with("; ") || !text.lines().next().is_some_and(|it| it.ends_with('.')) {
        return Err("the first line must be a comment with one claim, a sentence".into());
    }
    if text.contains("; error: ") {
        return errors(&text);
    }
    let passes = text.lines().find_map(|it| it.strip_prefix("; passes:"));
    let (given, expected) = match passes {
        Some(_) => text.split_once(SEPARATOR).unwrap_or((&text, "")),
        None => text.split_at(header_len(&text)),
    };
    let found = match passes {
        Some(passes) => {
            let found = transformed(given, passes)?;
            if found != transformed(given, passes)? {
                return Err("two runs give two results".into());
            }
            found
        }
        None => reprinted(expected)?,
    };
    if found == expected {
        return Ok(());
    }
    if std::env::var_os("BLESS").is_some() {
        let separator = if passes.is_some() { SEPARATOR } else { "" };
        return Ok(fs::write(path, format!("{given}{separator}{found}"))?);
    }
    same(&found, expected)
}

/// Length of the comments in front of a program.
fn header_len(text: &str) -> usize {
    text.split_inclusive('\n').take_while(|it| it.starts_with(';')).map(str::len).sum()
}

/// What the passes make of a program, or the error with which they refuse it.
fn transformed(given: &str, passes: &str) -> Result<String, Failed> {
    let mut program = text::parse(given)?;
    if let Some(error) = broken(&program).first() {
        return Err(format!("the given program is broken: {error}").into());
    }
    for name in passes.split(',').map(str::trim) {
        match apply(name, program)? {
            Ok(next) => program = next,
            Err(PassError::Failed { code, message, .. }) => {
                return Ok(format!("; error {code}: {message}\n"));
            }
            Err(error @ PassError::Broke { .. }) => return Err(error.to_string().into()),
        }
    }
    let text = program.to_string();
    same(&text::parse(&text)?.to_string(), &text)?;
    Ok(text)
}

fn apply(name: &str, program: Program) -> Result<Result<Program, PassError>, Failed> {
    let mut manager = PassManager::default();
    match program {
        Program::Graph(graph) if name == "lower" => Ok(Ok(Program::Plan(codegen::lower(&graph)))),
        Program::Graph(mut graph) => {
            let pass = find(passes::GRAPH_PASSES, name, &graph)?;
            Ok(manager.run(&mut graph, &[pass]).map(|()| Program::Graph(graph)))
        }
        Program::Plan(mut plan) => {
            let (schedule, place) = (ScheduleOverlap::default(), PlanMemory);
            let passes: [&dyn Pass<Plan>; 2] = [&schedule, &place];
            let pass = find(&passes, name, &plan)?;
            Ok(manager.run(&mut plan, &[pass]).map(|()| Program::Plan(plan)))
        }
    }
}

fn find<'a, I: Ir>(
    passes: &[&'a dyn Pass<I>],
    name: &str,
    program: &I,
) -> Result<&'a dyn Pass<I>, Failed> {
    let Some(pass) = passes.iter().find(|it| it.name() == name) else {
        let names: Vec<&str> = passes.iter().map(|it| it.name()).collect();
        return Err(format!("no pass `{name}` here; there are {}", names.join(", ")).into());
    };
    let (takes, is) = (pass.phases().0, program.phase());
    match takes == is {
        true => Ok(*pass),
        false => Err(format!("`{name}` takes phase {takes:?}, and the program is {is:?}").into()),
    }
}

/// Checks that each error is announced on its line, and each announcement comes true.
fn errors<'a>(text: &'a str) -> Result<(), Failed> {
    let announced = |(i, line): (usize, &'a str)| Some((i + 1, line.split_once("; error: ")?.1));
    let mut wanted: Vec<(usize, &str)> = text.lines().enumerate().filter_map(announced).collect();
    let mut unexpected = String::new();
    for (line, message) in refusals(text) {
        let found = wanted.iter().position(|it| it.0 == line && message.contains(it.1));
        match found {
            Some(found) => drop(wanted.remove(found)),
            None => writeln!(unexpected, "line {line}: {message}").expect("a String takes it"),
        }
    }
    if !unexpected.is_empty() {
        return Err(format!("no `; error: ` on its line announces\n{unexpected}").into());
    }
    match wanted.first() {
        None => Ok(()),
        Some((line, error)) => {
            Err(format!("line {line}: there is no error that says `{error}`").into())
        }
    }
}

/// Why a text is refused, by line: it does not parse, or what it says breaks a promise.
fn refusals(text: &str) -> Vec<(usize, String)> {
    let broken = match text::parse(text) {
        // A file that ends too early ends on its last line.
        Err(error) => {
            return vec![((error.line as usize).min(text.lines().count()), error.message)];
        }
        Ok(program) => broken(&program),
    };
    broken.into_iter().map(|it| (line_of(text, &it.place), it.message)).collect()
}

fn broken(program: &Program) -> Vec<VerifyError> {
    match program {
        Program::Graph(graph) => verify::graph::verify(graph),
        Program::Plan(plan) => verify::plan::verify(plan),
    }
}

/// The line that a broken promise is about; that of the program itself if it is about no other.
fn line_of(text: &str, place: &Place) -> usize {
    let lines = || text.lines().map(str::trim).enumerate().filter(|it| !it.1.starts_with(';'));
    let instruction = |line: &str| {
        let stream = line.split_once(':').map_or("", |it| it.0);
        stream.strip_prefix('s').is_some_and(|it| it.parse::<u32>().is_ok())
    };
    let defines = |line: &str, name: &str| {
        let before = line.split([':', '=']).next().unwrap_or_default();
        let names = before.rsplit_once('%').map(|_| before.split('%').skip(1));
        names.is_some_and(|mut it| it.any(|it| it.trim_matches([' ', ',', '"']) == name))
    };
    let found = match place {
        Place::Program => None,
        Place::Run => lines().find(|it| it.1.starts_with("run ")),
        Place::Node { index, .. } => lines().filter(|it| it.1.starts_with('%')).nth(*index),
        Place::Instruction { section: of, index } => {
            let header = format!("{}:", of.name());
            let body = lines().skip_while(|it| it.1 != header);
            body.filter(|it| instruction(it.1)).nth(*index)
        }
        Place::Param(name) => {
            let declares = |line: &str| {
                let rest = line.strip_prefix("param %");
                rest.and_then(|it| it.split([' ', ':']).next()) == Some(name.as_str())
            };
            lines().find(|it| declares(it.1))
        }
        Place::Value(name) | Place::Buffer(name) => lines().find(|it| defines(it.1, name)),
    };
    let program = || lines().next().map_or(0, |it| it.0);
    found.map_or_else(program, |it| it.0) + 1
}

/// A program, printed; its text form must parse back to itself.
fn reprinted(text: &str) -> Result<String, Failed> {
    let printed = text::parse(text)?.to_string();
    same(&text::parse(&printed)?.to_string(), &printed)?;
    Ok(printed)
}

/// Without lines that are comments.
fn without_comments(text: &str) -> String {
    text.split_inclusive('\n').filter(|it| !it.starts_with(';')).collect()
}

fn same(found: &str, expected: &str) -> Result<(), Failed> {
    if found == expected {
        return Ok(());
    }
    let lines = found.lines().zip(expected.lines());
    let first = lines.take_while(|(found, expected)| found == expected).count();
    let at = |text: &str| text.lines().nth(first).unwrap_or("(the end)").to_string();
    Err(format!(
        "line {} of the output differs (BLESS=1 accepts it)\nexpected: {}\nfound:    {}\n\n{found}",
        first + 1,
        at(expected),
        at(found),
    )
    .into())
}
