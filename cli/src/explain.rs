//! `planc explain`: the long form of every error code.
//!
//! The table is [`codes::CODES`]. A test holds it to the sources of the workspace: every code that
//! some crate can report is explained, and nothing else is. `docs/errors.md` is made from it.

mod codes;

use serde::Serialize;

use crate::report::{Failure, Format, Outcome, Ui, print, print_json};
use crate::table::wrapped;

/// Explains an error code, as in `planc explain PL0204`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The code; `204` and `pl0204` will do.
    #[arg(required_unless_present = "list")]
    code: Option<String>,
    /// All codes and what they are about.
    #[arg(long, conflicts_with = "code")]
    list: bool,
}

/// One stable code. Codes are never reused.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Code {
    /// `PL0204`.
    pub code: &'static str,
    /// A line.
    pub title: &'static str,
    /// What is wrong, and why it is refused.
    pub text: &'static str,
    /// What brings it about.
    pub example: &'static str,
    /// What would fix it.
    pub fix: &'static str,
}

/// Runs the command.
pub fn run(args: &Args, ui: &Ui) -> Outcome {
    if args.list {
        if ui.format == Format::Json {
            return print_json(&codes::CODES);
        }
        let lines: Vec<String> =
            codes::CODES.iter().map(|it| format!("{}  {}\n", it.code, it.title)).collect();
        print(&lines.concat());
        return Ok(());
    }
    let code = find(args.code.as_deref().unwrap_or_default())?;
    match ui.format {
        Format::Json => print_json(code),
        Format::Text => {
            print(&code.to_text());
            Ok(())
        }
    }
}

fn find(text: &str) -> Outcome<&'static Code> {
    let upper = text.trim().to_uppercase();
    let digits = upper.strip_prefix("PL").unwrap_or(&upper);
    let wanted = format!("PL{digits:0>4}");
    codes::CODES.iter().find(|it| it.code == wanted).ok_or_else(|| {
        Failure::new("PL0610", format!("there is no code `{text}`"))
            .help("`planc explain --list` lists all of them")
    })
}

impl Code {
    fn to_text(self) -> String {
        let mut res = format!("{}: {}\n", self.code, self.title);
        for (label, text) in [("", self.text), ("Example: ", self.example), ("Fix: ", self.fix)] {
            res.push('\n');
            for line in wrapped(&format!("{label}{text}"), 78) {
                res.push_str(&line);
                res.push('\n');
            }
        }
        res
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_in_order_and_distinct() {
        assert!(codes::CODES.windows(2).all(|it| it[0].code < it[1].code));
    }

    #[test]
    fn codes_are_found_however_they_are_typed() {
        for text in ["PL0204", "pl0204", "204", "0204", " PL0204 "] {
            assert_eq!(find(text).unwrap().code, "PL0204");
        }
        assert!(find("PL9999").is_err());
        assert!(find("").is_err());
    }
}
