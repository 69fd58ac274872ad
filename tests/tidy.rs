//! Rules that a compiler cannot check, so that they are checked before a push and not after.
//!
//! Every rule walks what is on disk, so a new crate, pass, op or page is under it from the start.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use ir::ops::OpKind;

/// Which crates of the workspace a crate may depend on. `tests` may depend on all, and is left out.
const ARROWS: &[(&str, &[&str])] = &[
    ("ir", &[]),
    // Looking at a checkpoint needs no compiler, no runtime and no mesh.
    ("checkpoint", &["ir"]),
    // What is fused is what a kernel runs.
    ("passes", &["ir", "kernels"]),
    ("kernels", &["ir"]),
    ("codegen", &["ir", "passes", "kernels"]),
    // A machine that runs plans needs no compiler.
    ("runtime", &["ir", "kernels", "checkpoint"]),
    ("cli", &["ir", "checkpoint", "passes", "codegen", "runtime"]),
    ("bench", &["ir", "checkpoint", "passes", "codegen", "kernels", "runtime"]),
];

/// Names of this workspace that no source may hold in full, lest this file breaks its own rules.
const UNFINISHED: &[&str] =
    &[concat!("todo", "!"), concat!("unimplemented", "!"), concat!("#[", "ignore")];
const STRIDED: &str = concat!("Strided", "Shard");

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The workspace's crates: folders with a manifest.
fn crates() -> Vec<String> {
    let mut res: Vec<String> = fs::read_dir(root())
        .expect("the workspace is readable")
        .map(|it| it.expect("its entries are readable"))
        .filter(|it| it.path().join("Cargo.toml").is_file())
        .map(|it| it.file_name().into_string().expect("crates have plain names"))
        .collect();
    res.sort();
    assert!(res.len() >= 7, "these cannot be all crates: {res:?}");
    res
}

/// All files below `folder` whose names end in `.ext`, by their path in the workspace.
fn files(folder: &str, ext: &str) -> BTreeMap<String, String> {
    let mut res = BTreeMap::new();
    let mut folders = vec![root().join(folder)];
    while let Some(folder) = folders.pop() {
        let Ok(entries) = fs::read_dir(&folder) else { continue };
        for entry in entries {
            let path = entry.expect("entries are readable").path();
            if path.is_dir() {
                if path.file_name().is_some_and(|it| it != "target" && it != ".git") {
                    folders.push(path);
                }
            } else if path.extension().is_some_and(|it| it == ext) {
                let name = path.strip_prefix(root()).expect("it was found there");
                let text = fs::read_to_string(&path).expect("sources are UTF-8");
                res.insert(name.display().to_string(), text);
            }
        }
    }
    res
}

/// Every Rust source of the workspace.
fn sources() -> BTreeMap<String, String> {
    let res: BTreeMap<_, _> = crates().iter().flat_map(|it| files(it, "rs")).collect();
    assert!(res.len() > 40, "these cannot be all sources");
    res
}

/// Fails with a list, if there is anything in it.
#[track_caller]
fn none(rule: &str, broken: Vec<String>) {
    assert!(broken.is_empty(), "{rule}:\n  {}", broken.join("\n  "));
}

/// Workspace crates that a manifest names in its sections of dependencies, for tests included.
fn dependencies(manifest: &str, crates: &[String]) -> BTreeSet<String> {
    let mut of_dependencies = false;
    let mut res = BTreeSet::new();
    for line in manifest.lines().map(str::trim) {
        if line.starts_with('[') {
            of_dependencies = line.contains("dependencies");
            let named = line.trim_matches(['[', ']']).rsplit_once("dependencies.");
            res.extend(named.map(|it| it.1.to_string()));
        } else if of_dependencies {
            let end = line.find(['.', '=', ' ']).unwrap_or(line.len());
            res.insert(line[..end].to_string());
        }
    }
    res.into_iter().filter(|it| crates.contains(it)).collect()
}

/// Lines with an identifier of which `word` is a part: `rank`, `n_rank`, but not `frank`.
fn lines_with_word<'a>(code: &'a str, word: &str) -> Vec<(usize, &'a str)> {
    let has = |line: &str| line.split(|it: char| !it.is_alphanumeric()).any(|it| it == word);
    code.lines().enumerate().filter(|it| has(it.1)).map(|(i, it)| (i + 1, it)).collect()
}

/// A source without its comments and without what stands in strings; line by line the same.
fn code_of(source: &str) -> String {
    let mut res = String::new();
    let mut rest = source;
    while let Some(it) = rest.chars().next() {
        let skipped = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("r#\"") {
            rest.find("\"#").map_or(rest.len(), |it| it + 2)
        } else if rest.starts_with("'\"'") {
            3
        } else if it == '"' {
            string_len(rest)
        } else {
            0
        };
        match skipped {
            0 => {
                res.push(it);
                rest = &rest[it.len_utf8()..];
            }
            len => {
                res.extend(rest[..len].chars().filter(|&it| it == '\n'));
                rest = &rest[len..];
            }
        }
    }
    res
}

/// Bytes of the string literal that a text starts with.
fn string_len(text: &str) -> usize {
    let mut escaped = true;
    for (i, it) in text.char_indices() {
        match it {
            '"' if !escaped => return i + 1,
            '\\' if !escaped => escaped = true,
            _ => escaped = false,
        }
    }
    text.len()
}

#[test]
fn code_is_told_from_comments_and_strings() {
    let source = "a /* \u{e9} */ // b\nlet c = \"d \\\" e\nf\"; '\"' g r#\"h \" i\"# j";
    assert_eq!(code_of(source), "a /* \u{e9} */ \nlet c = \n;  g  j");
}

#[test]
fn crates_depend_along_the_allowed_arrows_only() {
    let crates = crates();
    let mut broken = Vec::new();
    for name in &crates {
        let manifest =
            fs::read_to_string(root().join(name).join("Cargo.toml")).expect("it is there");
        let found = dependencies(&manifest, &crates);
        assert!(!found.is_empty() || name == "ir", "{name} depends on nothing: is it read right?");
        let Some((_, allowed)) = ARROWS.iter().find(|it| it.0 == name) else {
            if name != "tests" {
                broken.push(format!("{name} is not in ARROWS"));
            }
            continue;
        };
        let extra = found.iter().filter(|it| !allowed.contains(&it.as_str()));
        broken.extend(extra.map(|it| format!("{name} -> {it}")));
    }
    none("arrows that are not allowed", broken);
}

/// `ir::placement` is the one source of layout facts, and knows nothing of programs.
#[test]
fn placement_depends_on_nothing_else_in_ir() {
    let mut broken = Vec::new();
    for (path, text) in files("ir/src", "rs") {
        if path.starts_with("ir/src/placement") {
            let outside = text
                .lines()
                .filter(|it| it.contains("crate::") && !it.contains("crate::placement"));
            broken.extend(outside.map(|it| format!("{path}: {}", it.trim())));
        }
    }
    none("`placement` uses the rest of `ir`", broken);
}

#[test]
fn every_source_says_what_it_is_for() {
    let silent = sources().into_iter().filter(|it| !it.1.starts_with("//! ")).map(|it| it.0);
    none("files that do not open with `//!`", silent.collect());
}

/// Compiling touches axes, never ranks. Comments may say what a rank will do with the result (SPMD
/// is explained in terms of it); code may not name one.
#[test]
fn no_rank_below_bind() {
    let mut broken = Vec::new();
    for folder in ["passes/src", "codegen/src"] {
        let found = files(folder, "rs");
        assert!(!found.is_empty(), "{folder} has sources");
        for (path, text) in found {
            let code = code_of(&text);
            let lines = [lines_with_word(&code, "rank"), lines_with_word(&code, "ranks")].concat();
            broken.extend(lines.iter().map(|(n, it)| format!("{path}:{n}: {}", it.trim())));
        }
    }
    none("code that names a rank", broken);
}

/// PyTorch's notation is read and written in one place. Tests and the schema of `model.ron`, which
/// spells it as PyTorch does, may name it; comments and messages may speak of it.
#[test]
fn only_torch_knows_strided_shards() {
    let mut broken = Vec::new();
    for (path, text) in sources() {
        let allowed = ["ir/src/placement/torch.rs", "ir/src/model/", "ir/tests/", "tests/"];
        if allowed.iter().any(|it| path.starts_with(it)) {
            continue;
        }
        // The tests of a file come last in it.
        let end = text.find("#[cfg(test)]").unwrap_or(text.len());
        for (number, line) in code_of(&text[..end]).lines().enumerate() {
            if line.contains(STRIDED) {
                broken.push(format!("{path}:{}: {}", number + 1, line.trim()));
            }
        }
    }
    none("code that knows of strided shards", broken);
}

#[test]
fn nothing_is_unfinished() {
    let mut broken = Vec::new();
    for (path, text) in sources() {
        for (number, line) in text.lines().enumerate() {
            if UNFINISHED.iter().any(|it| line.contains(it)) {
                broken.push(format!("{path}:{}: {}", number + 1, line.trim()));
            }
        }
    }
    none("unfinished or ignored", broken);
}

#[test]
fn every_pass_has_filetests() {
    let mut names = BTreeSet::new();
    for (_, text) in files("passes/src", "rs") {
        // `fn name(&self) -> &'static str { "kebab-case" }` of each `impl Pass`.
        for block in text.split("impl Pass<").skip(1) {
            let name = block.split("fn name(").nth(1).and_then(|it| it.split('"').nth(1));
            names.insert(name.expect("a pass has a name").to_string());
        }
    }
    for pass in passes::GRAPH_PASSES {
        assert!(names.contains(pass.name()), "{} is not found in the sources", pass.name());
    }
    let empty = names.into_iter().filter(|it| {
        let folder = format!("tests/filetests/{it}");
        files(&folder, "ir").is_empty() && files(&folder, "plan").is_empty()
    });
    none("passes without a folder in tests/filetests", empty.collect());
}

/// What every op is tested with. Collectives have no samples: they are tested as steps of placement.
#[test]
fn every_op_has_samples() {
    let without = OpKind::ALL
        .iter()
        .filter(|&&it| it != OpKind::Collective && it.samples().is_empty())
        .map(|it| it.name().to_string());
    none("ops without samples", without.collect());
}

#[test]
fn every_op_has_a_file_and_every_file_is_an_op() {
    let ops: BTreeSet<String> =
        OpKind::ALL.iter().map(|it| format!("ir/src/ops/{}.rs", it.name())).collect();
    let source = fs::read_to_string(root().join("ir/src/ops.rs")).expect("it is there");
    let helpers = source.lines().filter_map(|it| {
        let name = it.trim_start_matches("pub ").strip_prefix("mod ")?.strip_suffix(';')?;
        Some(format!("ir/src/ops/{name}.rs"))
    });
    let known: BTreeSet<String> = ops.iter().cloned().chain(helpers).collect();
    let found: BTreeSet<String> = files("ir/src/ops", "rs").into_keys().collect();
    let found: BTreeSet<String> = found
        .into_iter()
        .filter(|it| it.trim_start_matches("ir/src/ops/").matches('/').count() == 0)
        .collect();
    none("ops whose file is not called like them", ops.difference(&found).cloned().collect());
    none("files that `define_ops!` does not list", found.difference(&known).cloned().collect());
}

/// Code that names ops, besides kernels, which run them, and fusion, which rewrites them; with the ops that it is about.
/// All other code asks an op (`OpDef`), so that an added op is in none of its lists.
const ABOUT_OPS: &[(&str, &[&str])] = &[
    // A model of Hugging Face has its heads where attention has them.
    ("checkpoint/src/hf/params.rs", &["Attention"]),
    // The first micro-batch writes sums to which the others add.
    ("codegen/src/lower.rs", &["Add"]),
    // The way from a GEMM to what its operands were before they were quantized.
    ("ir/src/amax.rs", &["Cast", "DelayedScale", "Hadamard", "Matmul", "QuantMatmul"]),
    // Cuts of a weight between blocks are a matter of placement.
    ("ir/src/meaning.rs", &["QuantizeBlock"]),
    // A loss in chunks has slices of the labels; fields of a recipe are about GEMMs.
    ("ir/src/model/elaborate.rs", &["Matmul", "SliceDim"]),
    ("ir/src/verify/plan/program.rs", &["SliceDim"]),
    // The norm of the gradient.
    ("ir/src/verify/plan/gradients.rs", &["Add", "ClipScale", "SumSquares"]),
    // Scales of tensors in pieces.
    (
        "passes/src/choose_amax_groups.rs",
        &["Amax", "Cast", "QuantMatmul", "QuantScale", "Quantize", "RoundNvFp4", "Transpose"],
    ),
    // The loss of a chunk.
    ("passes/src/interleave_chunks.rs", &["CeLoss", "CeLossGrad", "CeStats", "CrossEntropy"]),
    // GEMMs are quantized.
    ("passes/src/quantize.rs", &["Matmul"]),
    // Amaxes, as each kind of scale reads them.
    ("passes/src/watch_amaxes.rs", &["ClipScale", "QuantScale", "QuantizeBlock", "RoundNvFp4"]),
    // The amaxes of a body are those of its results.
    ("runtime/src/backend/cuda/check.rs", &["Amax"]),
    // Sizes that tiles do not divide, and bodies around activations and GLUs.
    ("runtime/src/backend/cuda/check/cases.rs", &["Activation", "Amax", "GluGrad", "Transpose"]),
];

#[test]
fn ops_are_named_where_they_are_made_rewritten_or_run() {
    let free =
        ["ir/src/ops.rs", "ir/src/ops/", "kernels/src/", "passes/src/fuse.rs", "passes/src/fuse/"];
    let mut broken = Vec::new();
    for (path, text) in sources() {
        let test = path.starts_with("tests/") || path.contains("/tests");
        if test || free.iter().any(|it| path.starts_with(it)) {
            continue;
        }
        // The tests of a file come last in it.
        let end = text.find("#[cfg(test)]\nmod tests {").unwrap_or(text.len());
        let code = code_of(&text[..end]);
        let mut found: Vec<String> = OpKind::ALL
            .iter()
            // The first two are data between ranks, and not computation; the third is a program of other ops.
            .filter(|it| !matches!(it, OpKind::Collective | OpKind::Reshard | OpKind::Fused))
            .map(|it| format!("{it:?}"))
            .filter(|it| ["Op::", "OpKind::"].iter().any(|of| names(&code, &format!("{of}{it}"))))
            .collect();
        found.sort();
        let about = ABOUT_OPS.iter().find(|it| it.0 == path).map_or(&[][..], |it| it.1);
        if found != about {
            broken.push(format!("{path} names {found:?}, and is about {about:?}"));
        }
    }
    none("ops that are named elsewhere (a fact of an op is a method of `OpDef`)", broken);
}

/// Whether a path of identifiers occurs, and not only as a part of a longer one.
fn names(code: &str, path: &str) -> bool {
    let part = |it: Option<char>| it.is_some_and(|it| it.is_alphanumeric() || it == '_');
    code.match_indices(path).any(|(at, _)| {
        !part(code[..at].chars().next_back()) && !part(code[at + path.len()..].chars().next())
    })
}

#[test]
fn docs_name_every_crate() {
    let pages = files("docs", "md");
    assert!(!pages.is_empty(), "there is documentation");
    let map = &pages["docs/architecture.md"];
    let unnamed = crates().into_iter().filter(|it| !map.contains(&format!("`{it}`")));
    none("crates that docs/architecture.md does not name", unnamed.collect());
}

/// Links between pages, and the files that they point to.
#[test]
fn docs_name_files_that_exist() {
    let mut broken = Vec::new();
    let mut pages = files("docs", "md");
    if let Ok(readme) = fs::read_to_string(root().join("README.md")) {
        pages.insert("README.md".to_string(), readme);
    }
    for (page, text) in pages {
        let quoted = text.split('`').skip(1).step_by(2);
        let named = quoted.filter(|it| it.starts_with("docs/") || it.starts_with("examples/"));
        for name in named.filter(|it| !it.contains([' ', '*', '<', 'N'])) {
            if !root().join(name).exists() {
                broken.push(format!("{page} names `{name}`"));
            }
        }
    }
    none("pages that name files that are not there", broken);
}

#[test]
fn there_are_examples() {
    let examples = files("examples", "ron");
    assert!(!examples.is_empty(), "examples/*.ron, which the README shows and tests compile");
}
