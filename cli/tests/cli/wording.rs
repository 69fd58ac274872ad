//! Tests of messages: each runs a command and checks that its words are right.

use std::fs;

use ir::ops::OpKind;
use serde_json::Value;

use crate::{Folder, unwrapped, workspace};

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|it| panic!("{it}: {text}"))
}

/// Runs `planc line` on the example of this name, which must be refused; its report, unwrapped.
#[track_caller]
fn refused(test: &str, line: &str) -> String {
    let ran = Folder::new(test, &[]).planc(line);
    assert_eq!((ran.code, ran.stdout.as_str()), (1, ""), "planc {line}");
    unwrapped(&ran.stderr)
}

/// The text of a page without its tags, white space being one space.
fn without_tags(html: &str) -> String {
    let mut res = String::new();
    for part in html.split('<') {
        res.push(' ');
        res.push_str(part.split_once('>').map_or(part, |it| it.1));
    }
    unwrapped(&res)
}

#[test]
fn a_page_does_not_call_partial_values_copies() {
    let folder = Folder::new("partial_page", &[]);
    folder.works("inspect model.ron --mesh 2x4 --html page.html");
    let html = folder.read("page.html");
    let notes: Vec<String> = html.split("<p class=\"note\">").skip(1).map(without_tags).collect();
    let partial: Vec<&String> = notes.iter().filter(|it| it.contains("Partial over")).collect();
    assert!(!partial.is_empty(), "row-parallel products are partial");
    for it in partial {
        let (copies, rest) = it.split_once("Partial over ").expect("it was found");
        let (axes, sentence) = rest.split_once(':').expect("a sentence");
        let of = |noun| format!(" the value is the {noun} of what these ranks hold.");
        assert!(["sum", "maximum"].iter().any(|it| sentence.starts_with(&of(it))), "{it}");
        assert!(axes.split(", ").all(|axis| !copies.contains(axis)), "{it}");
    }
}

/// A reduction's result is called after how it reduces.
#[test]
fn a_maximum_is_not_called_a_sum() {
    let folder = Folder::new("maximum", &[]);
    let model = fs::read(workspace("examples/llama-tiny-fp8.ron")).expect("an example");
    folder.write("fp8.ron", model);
    let text = folder.works("compile fp8.ron --mesh 2x2 --emit explicit");
    let lines = text.lines().filter_map(|it| it.trim().split_once(" = "));
    let reductions = lines.filter(|it| it.1.starts_with("all_reduce("));
    let (mut sums, mut maxima) = (0, 0);
    for (name, call) in reductions {
        let named = |word: &str| name.split('.').any(|it| it == word);
        if call.contains("_reduce(max") {
            assert!(!named("sum"), "{name} = {call}");
            maxima += usize::from(named("max"));
        } else {
            sums += usize::from(named("sum"));
        }
    }
    assert!(sums > 0 && maxima > 0, "{text}");
}

/// Each page that a code names exists, and so does the section that stands in quotes behind it.
#[test]
fn explanations_name_pages_and_sections_that_exist() {
    let folder = Folder::new("explained_pages", &[]);
    let codes = json(&folder.works("explain --list --format json"));
    let mut named = 0;
    for it in codes.as_array().expect("a list") {
        for field in ["text", "example", "fix"] {
            let text = it[field].as_str().expect("text");
            for (at, _) in text.match_indices("docs/") {
                let end = text[at..].find(".md").expect("pages end in .md") + at + 3;
                let page = fs::read_to_string(workspace(&text[at..end]));
                let page = page.unwrap_or_else(|e| panic!("{}: {text}: {e}", it["code"]));
                if let Some(section) = text[end..].strip_prefix(", \"") {
                    let section = section.split('"').next().unwrap_or_default();
                    let heads = page.lines().filter(|line| line.starts_with('#'));
                    let mut heads = heads.map(|line| line.trim_start_matches('#').trim());
                    assert!(heads.any(|head| head == section), "{}: no `{section}`", it["code"]);
                }
                named += 1;
            }
        }
    }
    assert!(named >= 5, "{named} pages are named");
}

/// PL0213 is about ops of a block: the page that it names has them all, with their attributes.
#[test]
fn an_unknown_op_is_explained_by_the_page_that_lists_ops() {
    let text = unwrapped(&Folder::new("explain_ops", &[]).works("explain PL0213"));
    assert!(text.contains("docs/model.md, \"A block of your own\""), "{text}");
    let page = fs::read_to_string(workspace("docs/model.md")).expect("a page");
    let section = page.split("### A block of your own").nth(1).expect("a section");
    let section = section.split("\n## ").next().unwrap_or_default();
    for op in ["matmul", "attention", "rms_norm", "glu", "slice_dim", "transpose"] {
        assert!(OpKind::ALL.iter().any(|it| it.name() == op), "{op} is no op");
        assert!(section.contains(&format!("| `{op}` |")), "{op}");
    }
}

/// The options that README names behind its section on Llama-3-8B work on it.
#[test]
fn options_of_the_readme_work_on_the_model_of_their_section() {
    let readme = fs::read_to_string(workspace("README.md")).expect("the README");
    let text = readme.split("Other things to try: ").nth(1).expect("a paragraph");
    let text = text.split("\n\n").next().unwrap_or_default();
    let options: Vec<&str> =
        text.split('`').skip(1).step_by(2).filter(|it| it.starts_with("--")).collect();
    assert!(options.len() >= 3, "{options:?}");
    let folder = Folder::new("readme_options", &[]);
    folder.write("8b.ron", fs::read(workspace("examples/llama3-8b.ron")).expect("an example"));
    for it in options {
        let mesh = if it.contains("--mesh") { "" } else { "--mesh 2x4" };
        let ran = folder.planc(&format!("compile 8b.ron {mesh} {}", it.replace('\'', "")));
        assert_eq!((ran.code, ran.stderr.as_str()), (0, ""), "{it}");
    }
}

/// Two dots after a command are a folder for a shell.
#[test]
fn prose_names_no_folder_where_it_means_a_model() {
    let mut pages: Vec<_> = fs::read_dir(workspace("docs")).expect("pages").collect();
    pages.sort_by_key(|it| it.as_ref().expect("a page").path());
    let mut paths: Vec<_> = pages.into_iter().map(|it| it.expect("a page").path()).collect();
    paths.push(workspace("README.md"));
    for path in paths.into_iter().filter(|it| it.extension().is_some_and(|it| it == "md")) {
        let text = fs::read_to_string(&path).expect("a page");
        for (at, _) in text.match_indices("planc ") {
            let line = text[at..].lines().next().unwrap_or_default();
            let code = line.split(['`', '#']).next().unwrap_or_default();
            let dots = |word: &str| word == ".." || word == "...";
            assert!(!code.split_whitespace().skip(1).any(dots), "{}: {code}", path.display());
        }
    }
}

#[test]
fn an_axis_of_another_system_is_not_taken_for_dp() {
    let text = refused("axis_cp", "compile model.ron --mesh cp=2");
    assert!(text.contains("no mesh of this model has an axis `cp`"), "{text}");
    assert!(!text.contains("did you mean `dp`"), "{text}");
    let text = refused("axis_pt", "compile model.ron --mesh pt=2");
    assert!(text.contains("did you mean `tp`?"), "{text}");
}

#[test]
fn a_set_that_cannot_be_applied_says_what_was_meant() {
    let check = |set: &str, parts: &[&str]| {
        let text = refused("set_meant", &format!("compile model.ron --mesh 2 --set {set}"));
        assert!(text.starts_with("error[PL0107]"), "{text}");
        assert!(parts.iter().all(|it| text.contains(it)), "{text}");
        // The parser's own words are not for users.
        assert!(!text.contains("digit") && !text.contains("struct `Precision`"), "{text}");
    };
    let current = "did you mean `--set 'recipe=Float8CurrentScaling()'`?";
    check("recipe=Float8CurrentScaling", &["found the name alone", current]);
    check("precision=bf16", &["expected fields in `(...)`", "`--set 'precision.compute=bf16'`"]);
    check("sequence=abc", &["expected a whole number, found `abc`"]);
    // Nothing is added where nothing was meant.
    for set in ["sequence=abc", "layers[9].n=2", "micro_batchs=2", "precision.compute=bf17"] {
        let text = refused("set_plain", &format!("compile model.ron --mesh 2 --set {set}"));
        assert!(!text.contains("help:"), "{text}");
    }
}

/// Each mesh that is too large comes with the memory, at which instruction it is taken, and by what.
#[test]
fn a_sweep_says_what_takes_the_memory() {
    let folder = Folder::new("sweep_too_large", &[]);
    folder.write("8b.ron", fs::read(workspace("examples/llama3-8b.ron")).expect("an example"));
    let line = "sweep 8b.ron --gpus 8 --target h200 --set batch=Global(512)";
    let text = folder.works(line);
    let why = text.split("Too large:").nth(1).expect("no mesh fits");
    let found = json(&folder.works(&format!("{line} --format json")));
    for it in found["meshes"].as_array().expect("a list") {
        let mesh = it["mesh"].as_str().expect("text");
        assert_eq!(it["fits"], it["needs_bytes"].as_u64() <= found["limit_bytes"].as_u64());
        assert_eq!(it["fits"], it["too_large"].is_null(), "{mesh}");
        if it["fits"] == true {
            continue;
        }
        let said = unwrapped(why).split([' ', ',', ':']).any(|word| word == mesh);
        assert!(said, "{mesh} is not in {why}");
        let large = &it["too_large"];
        let part = |name: &str| large[name].as_u64().expect("bytes");
        let planned = part("kept_bytes") + part("temporary_bytes") + part("scratch_bytes");
        assert_eq!(Some(planned), it["planned_bytes"].as_u64(), "{mesh}");
        assert!(large["peak"].as_str().expect("text").contains(" of "), "{large}");
    }
    for word in
        [" kept, ", " temporary at step ", " scratch, ", " beside the plan", "largest then: "]
    {
        assert!(unwrapped(why).contains(word.trim()), "{word}: {why}");
    }
}

/// One figure is compared with the limit, and has one name.
#[test]
fn the_memory_that_decides_is_called_needs() {
    let folder = Folder::new("needs", &[]);
    let line = "model.ron --mesh 2x4 --target h200";
    let text = unwrapped(&folder.works(&format!("compile {line}")));
    assert!(text.contains("needs 2.70 GiB a rank, and may take 139 GiB (this decides"), "{text}");
    let compiled = json(&folder.works(&format!("compile {line} --format json")));
    let needs = compiled["needs"]["needs_bytes"].as_u64().expect("bytes");
    let beside = compiled["needs"]["beside_bytes"].as_u64().expect("bytes");
    assert_eq!(needs, compiled["memory"]["total_bytes"].as_u64().expect("bytes") + beside);
    let swept = "sweep model.ron --gpus 8 --target h200";
    let rows = json(&folder.works(&format!("{swept} --format json")));
    let rows = rows["meshes"].as_array().expect("a list");
    let row = rows.iter().find(|it| it["mesh"] == "2x4").expect("the mesh is swept");
    assert_eq!(row["needs_bytes"], needs);
    assert!(folder.works(swept).contains("needs"));
    folder.works(&format!("inspect {line} --html page.html"));
    let page = folder.read("page.html");
    assert!(page.contains(&format!("data-figure=\"memory\" data-value=\"{needs}\"")));
    assert!(without_tags(&page).contains("what a rank needs, which is compared with"));
    // With a limit of bytes alone, nothing is beside the plan.
    let text = unwrapped(&folder.works("compile model.ron --mesh 2x4 --mem-limit 80G"));
    assert!(text.contains("may take 80.0 GiB (this decides"), "{text}");
}

#[test]
fn collectives_have_their_names_and_reasons() {
    let folder = Folder::new("collectives", &[]);
    let text = folder.works("inspect model.ron --mesh 2x4 --collectives");
    let found = json(&folder.works("inspect model.ron --mesh 2x4 --collectives --format json"));
    let list = found["collectives"].as_array().expect("a list");
    let text = text.split("bytes\n").nth(1).expect("a table");
    // A line that is not indented starts a collective.
    let blocks = text.replace("\n    ", " ");
    assert_eq!(blocks.lines().count(), list.len());
    for (block, it) in blocks.lines().zip(list) {
        let (first, why) = (it["results"][0].as_str(), it["why"].as_str().expect("text"));
        let words = |name: &str| block.split([' ', ':']).any(|word| word == name);
        assert!(words(first.expect("a name")), "{first:?} is not in {block}");
        assert!(unwrapped(block).ends_with(why), "{why} is not in {block}");
        assert!(why.contains(" -> "), "{why}");
        assert!(why.contains(", for `") || why.contains(", kept for the next step"), "{why}");
    }
    let gather = list.iter().find(|it| it["kind"] == "all_gather").expect("FSDP gathers");
    assert_eq!(
        gather["why"],
        "[tp.dp, _] -> [tp, _], for `embedding` making `model.embed_tokens.partial`"
    );
}

/// A prediction says how much of it rests on measurements.
#[test]
fn a_prediction_says_what_was_never_measured() {
    let folder = Folder::new("basis", &[]);
    let compiled = |line: &str| unwrapped(&folder.works(&format!("compile model.ron {line}")));
    let none = "basis no figure of h100 was measured: data sheets, derived, assumed";
    assert!(compiled("--mesh 2 --target h100").contains(none));
    let text = compiled("--mesh 2 --target h200");
    assert!(text.contains(" figures of h200 were measured"), "{text}");
    assert!(!text.contains("not measured:"), "{text}");
    let text = compiled("--mesh 2x4 --target h200");
    assert!(text.contains("not measured: groups of more than 2 ranks"), "{text}");
    assert!(!text.contains("links between nodes"), "{text}");
    let nodes = "not measured: groups of more than 2 ranks, links between nodes";
    let text = compiled("--mesh 16 --set batch=Global(16) --target h200");
    assert!(text.contains(nodes), "{text}");
    let line = "sweep model.ron --gpus 16 --target h200 --set batch=Global(16)";
    assert!(unwrapped(&folder.works(line)).contains(nodes));
    let found = json(&folder.works(&format!("{line} --format json")));
    assert!(found["meshes"][0]["basis"].as_str().expect("text").ends_with(nodes));
    folder.works("inspect model.ron --mesh 2 --target h100 --html page.html");
    assert!(without_tags(&folder.read("page.html")).contains("no figure of h100 was measured"));
}
