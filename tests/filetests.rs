//! One named test per file of `tests/filetests`, and per `ir` block of `docs/ir.md`.
//!
//! A file opens with a comment that states one claim. What follows is one of
//!
//! * `; passes: a, b` and a program; below `; ---`, what the passes make of it, or the error with
//!   which they refuse it. `lower` stands for the step from a graph to a plan.
//! * a program with `; error: text` on the lines that the parser or the verifier must refuse.
//! * a program, which must print as it stands.
//!
//! `BLESS=1` rewrites what is expected; errors are never rewritten. Every program that is printed must
//! parse back to the same text, and passes must give the same text when run twice.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use ir::plan::Plan;
use ir::text::{self, Program};
use libtest_mimic::{Arguments, Failed, Trial};
use passes::{Ir, Pass, PassError, PassManager, PlanMemory, ScheduleOverlap};

/// Stands between the given program and what is expected.
const SEPARATOR: &str = "; ---\n";

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
fn errors(text: &str) -> Result<(), Failed> {
    let mut wanted: Vec<(usize, &str, &str)> = Vec::new();
    for (number, line) in text.lines().enumerate() {
        if let Some((line, error)) = line.split_once("; error: ") {
            wanted.push((number + 1, line, error.trim()));
        }
    }
    let mut unexpected = String::new();
    let mut check = |message: &str, on: &dyn Fn(usize, &str) -> bool| {
        let found = wanted
            .iter()
            .position(|&(number, line, error)| on(number, line) && message.contains(error));
        match found {
            Some(found) => drop(wanted.remove(found)),
            None => writeln!(unexpected, "{message}").expect("a String takes everything"),
        }
    };
    match text::parse(text) {
        Err(error) => {
            // A file that ends too early ends on its last line.
            let at = (error.line as usize).min(text.lines().count());
            check(&error.message, &|number, _| number == at);
        }
        Ok(program) => {
            let broken = match &program {
                Program::Graph(graph) => graph.verify(),
                Program::Plan(plan) => plan.verify(),
            };
            for message in broken {
                check(&message, &|_, line| mentions(&message, line));
            }
        }
    }
    if !unexpected.is_empty() {
        return Err(format!("no `; error: ` on the right line announces\n{unexpected}").into());
    }
    match wanted.first() {
        None => Ok(()),
        Some((number, _, error)) => {
            Err(format!("line {number}: there is no error that says `{error}`").into())
        }
    }
}

/// Whether a message names what the line defines.
fn mentions(message: &str, line: &str) -> bool {
    let Some((_, rest)) = line.split_once('%') else { return true };
    let name = rest.split([' ', ',', ':', '#']).next().unwrap_or_default();
    message.contains(&format!("`{name}`"))
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
