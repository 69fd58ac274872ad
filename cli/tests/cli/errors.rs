//! The table of `planc explain`, held to the sources and to `docs/errors.md`.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::{Folder, workspace};

fn table() -> Vec<Value> {
    let text = Folder::new("table", &[]).works("explain --list --format json");
    serde_json::from_str(&text).expect("a list of codes")
}

/// Codes as string literals in a source: `"PL0204"`.
fn codes(path: &Path, res: &mut BTreeSet<String>) {
    if path.is_dir() {
        for entry in fs::read_dir(path).expect("sources are readable") {
            codes(&entry.expect("sources are readable").path(), res);
        }
    } else if path.extension().is_some_and(|it| it == "rs") && !path.ends_with("explain/codes.rs") {
        let text = fs::read_to_string(path).expect("sources are UTF-8");
        // What tests make up is no code that planc reports.
        let text = text.split("#[cfg(test)]").next().unwrap_or_default();
        for (at, _) in text.match_indices("\"PL") {
            let code = &text[at + 1..];
            let code: String = code.chars().take_while(|it| it.is_ascii_alphanumeric()).collect();
            if code.len() == 6 {
                res.insert(code);
            }
        }
    }
}

#[test]
fn every_code_is_explained_and_nothing_else() {
    let mut reported = BTreeSet::new();
    for source in ["ir", "checkpoint", "passes", "codegen", "kernels", "runtime", "cli"] {
        codes(&workspace(source).join("src"), &mut reported);
    }
    let explained: BTreeSet<String> =
        table().iter().map(|it| it["code"].as_str().expect("a code").to_string()).collect();
    assert_eq!(explained, reported);
}

/// `BLESS=1` rewrites the page.
#[test]
fn the_page_of_errors_is_the_table() {
    let mut page =
        "# Errors\n\nEvery error has a stable code; `planc explain PL0204` prints what is \
                    below. Made from\n`cli/src/explain/codes.rs` by `BLESS=1 cargo test -p cli`.\n"
            .to_string();
    for it in table() {
        let text = |field: &str| it[field].as_str().expect("text").replace('<', "&lt;");
        page.push_str(&format!("\n## {}: {}\n\n{}\n\n", text("code"), text("title"), text("text")));
        page.push_str(&format!("Example: {}\n\nFix: {}\n", text("example"), text("fix")));
    }
    let path = workspace("docs/errors.md");
    if std::env::var_os("BLESS").is_some() {
        fs::write(&path, &page).expect("docs are writable");
    }
    let written = fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(written, page, "docs/errors.md is stale: BLESS=1 cargo test -p cli");
}
