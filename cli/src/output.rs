//! Files that commands write. A file that planc did not write stays, unless `--force` is given; each format is known by
//! its first bytes. A file appears as a whole or not at all ([`OutputFile`]).

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use runtime::output::{OutputFile, is_direct};
use serde_json::Value;

use crate::controls::clean;
use crate::input::reason;
use crate::report::{Failure, Outcome};

/// The option of all commands that write files.
#[derive(Debug, Clone, Copy, Default, clap::Args)]
pub struct ForceArgs {
    /// Overwrite files that planc did not write.
    #[arg(long)]
    pub force: bool,
}

/// A format that a command writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// A plan, IR, or the meaning of a plan.
    Program,
    /// The page of `inspect --html`.
    Page,
    /// The properties that `verify` proved.
    Certificate,
    /// A model, which its user edits: none is taken for planc's.
    Model,
    /// A line of JSON a step.
    Metrics,
    /// A trace for Perfetto.
    Trace,
    /// A manual page.
    Manual,
}

/// A file that a command is to write.
#[derive(Debug, Clone, Copy)]
pub struct Output<'a> {
    /// The option that names it.
    pub flag: &'a str,
    /// The path that the user gave.
    pub path: &'a Path,
    /// The format of its content.
    pub format: Format,
    /// True if the file may replace any other file.
    pub force: bool,
}

impl Output<'_> {
    /// Refuses to write over what the command reads, a part of a checkpoint, or what planc did not write.
    pub fn check<'b>(&self, inputs: impl IntoIterator<Item = &'b Path>) -> Outcome {
        for input in inputs {
            if is_same_file(self.path, input) {
                return self.refused(&format!("would overwrite `{}`", input.display()));
            }
        }
        if self.path.parent().is_some_and(|it| it.join(".metadata").is_file()) {
            return self.refused("would change a checkpoint");
        }
        if self.force {
            return Ok(());
        }
        if self.path.exists() && self.path.extension().is_some_and(|it| it == "ron") {
            return self.refused("would overwrite a model");
        }
        self.check_writer()
    }

    fn refused(&self, what: &str) -> Outcome {
        let message = format!("`{} {}` {what}", self.flag, self.path.display());
        Err(Failure::new("PL0613", message).help(format!(
            "name another file, as in `{} {}`",
            self.flag,
            self.format.example()
        )))
    }

    /// Refuses to write over what is not planc's own and of this format.
    fn check_writer(&self) -> Outcome {
        if is_direct(self.path) || !self.path.exists() {
            return Ok(());
        }
        let path = self.path.display();
        let head = head(self.path).map_err(|it| {
            Failure::new(
                "PL0601",
                format!("cannot read `{path}`, which is in the way: {}", reason(&it)),
            )
        })?;
        // Nothing is lost with an empty file, as `mktemp` makes.
        if head.is_empty() || self.format.is_in(&head) {
            return Ok(());
        }
        let message = format!("`{} {path}` would overwrite {}", self.flag, seems(&head));
        Err(Failure::new("PL0614", message)
            .help("name another file, or add `--force` if this one may go"))
    }

    /// Writes the file as a whole.
    pub fn write(&self, text: &str) -> Outcome {
        let written = OutputFile::create(self.path)
            .and_then(|mut it| it.write_all(text.as_bytes()).and_then(|()| it.finish()));
        written.map_err(|it| {
            let message = format!("cannot write `{}`: {}", self.path.display(), reason(&it));
            Failure::new("PL0601", message)
        })
    }
}

/// Returns true if two paths lead to one file, which may have several names.
pub fn is_same_file(a: &Path, b: &Path) -> bool {
    let identity = |it: &Path| fs::metadata(it).map(|it| (it.dev(), it.ino()));
    a == b || matches!((identity(a), identity(b)), (Ok(a), Ok(b)) if a == b)
}

/// Bytes of a file by which its format is known: more than the first lines of each.
const HEAD: u64 = 64 << 10;

fn head(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut res = Vec::new();
    File::open(path)?.take(HEAD).read_to_end(&mut res)?;
    Ok(res)
}

impl Format {
    const ALL: [(Format, &'static str); 6] = [
        (Format::Program, "a plan or IR"),
        (Format::Page, "a report of planc"),
        (Format::Certificate, "a certificate of a plan"),
        (Format::Metrics, "metrics of a run"),
        (Format::Trace, "a trace of planc"),
        (Format::Manual, "a manual page of planc"),
    ];

    /// The name that a file of this format may have.
    fn example(self) -> &'static str {
        match self {
            Format::Program => "other.plan",
            Format::Page => "page.html",
            Format::Certificate => "certificate.json",
            Format::Model => "other.ron",
            Format::Metrics => "metrics.jsonl",
            Format::Trace => "trace.json",
            Format::Manual => "pages",
        }
    }

    /// Returns true if a file that planc wrote in this format begins like this.
    fn is_in(self, head: &[u8]) -> bool {
        let text = String::from_utf8_lossy(head);
        let mut lines = text.lines();
        let json = |line: Option<&str>| -> Value {
            let line = line.unwrap_or_default().trim_end_matches(',');
            serde_json::from_str(line).unwrap_or_default()
        };
        match self {
            Format::Program => {
                let first = lines.map(str::trim).find(|it| !it.is_empty() && !it.starts_with(';'));
                let program = |it: &str| it.starts_with("graph @") || it.starts_with("plan @");
                first.is_some_and(|it| program(it) && it.contains(" phase="))
                    || json(first)["program"].is_object()
            }
            Format::Page => {
                text.starts_with("<!DOCTYPE html>") && text.contains(" · planc</title>")
            }
            Format::Certificate => text.starts_with("{\n  \"planc\": \""),
            Format::Model => false,
            Format::Metrics => {
                let line = json(lines.next());
                ["step", "loss", "grad_norm", "lr", "tokens_per_s"]
                    .iter()
                    .all(|it| line.get(it).is_some())
            }
            Format::Trace => {
                let opened = lines.next() == Some("[");
                let first = json(lines.next());
                let process = first["args"]["name"].as_str().unwrap_or_default();
                opened && first["name"] == "process_name" && process.starts_with("planned (")
            }
            Format::Manual => lines.take(10).any(|it| it.starts_with(".TH planc")),
        }
    }
}

/// Describes a file by its first bytes.
fn seems(head: &[u8]) -> String {
    if let Some((_, name)) = Format::ALL.iter().find(|it| it.0.is_in(head)) {
        return name.to_string();
    }
    let safetensors = head.len() > 8 && head[8] == b'{' && head[5..8] == [0; 3];
    let binary = [
        (safetensors, "a safetensors file"),
        (head.starts_with(b"PK\x03\x04"), "a zip archive, as `torch.save` writes"),
        (head.starts_with(b"\x80\x02") || head.starts_with(b"\x80\x04"), "a Python pickle"),
        (head.starts_with(b"\x93NUMPY"), "a NumPy array"),
        (head.starts_with(b"GGUF"), "a GGUF file"),
        (head.starts_with(b"\x7fELF"), "a program"),
        (head.starts_with(b"\x1f\x8b"), "a gzip archive"),
    ];
    if let Some((_, name)) = binary.iter().find(|it| it.0) {
        return name.to_string();
    }
    // The head may end within a character.
    let text = match std::str::from_utf8(head) {
        Ok(it) => it,
        Err(it) if it.error_len().is_none() && it.valid_up_to() > 0 => {
            std::str::from_utf8(&head[..it.valid_up_to()]).unwrap_or_default()
        }
        Err(_) => return "binary data that planc did not write".to_string(),
    };
    if text.contains('\0') {
        return "binary data that planc did not write".to_string();
    }
    let first: String =
        text.trim_start().lines().next().unwrap_or_default().chars().take(40).collect();
    let what = match text.trim_start().chars().next() {
        Some('#') if text.starts_with("#!") => "a script",
        Some('{' | '[') => "JSON",
        Some('<') => "markup",
        _ => "text",
    };
    format!("{what} that planc did not write (`{}`)", clean(&first))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(head: &[u8], expected: &str) {
        assert_eq!(seems(head), expected);
        assert!(!Format::ALL.iter().any(|it| it.0.is_in(head)));
    }

    #[test]
    fn files_of_others_are_told_apart() {
        check(b"\x40\0\0\0\0\0\0\0{\"tokens\":", "a safetensors file");
        check(b"PK\x03\x04..", "a zip archive, as `torch.save` writes");
        check(b"#!/bin/sh\nrm", "a script that planc did not write (`#!/bin/sh`)");
        check(b"{\"step\": 1}\n", "JSON that planc did not write (`{\"step\": 1}`)");
        check(b"[\n{\"name\": \"a\"},\n", "JSON that planc did not write (`[`)");
        check(
            b"<!DOCTYPE html><title>a</title>",
            "markup that planc did not write (`<!DOCTYPE html><title>a</title>`)",
        );
        check(b"plan for today\n", "text that planc did not write (`plan for today`)");
        check(&[1, 0, 2, 0], "binary data that planc did not write");
        check("\u{1b}[2Jé".as_bytes(), "text that planc did not write (`\\u{1b}[2Jé`)");
        check(&"aé".as_bytes()[..2], "text that planc did not write (`a`)");
    }
}
