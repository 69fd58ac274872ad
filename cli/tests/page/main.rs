//! The page of `planc inspect --html` in a browser: it says what the plan says, works from the keyboard,
//! and asks the network for nothing.
//!
//! Expected numbers come from `ir`, which the page's code reads too, but along other ways: boxes of ranks from
//! `Sharding::chunks`, totals from `Summary`, `memory_profile`, `Timeline`, `CheckpointLayout`. Pictures of pages are
//! left in `target/page`.

mod browser;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use ir::amax::scaled_gemms;
use ir::checkpoint::CheckpointLayout;
use ir::cost::{Target, Timeline};
use ir::model::MeshSpec;
use ir::plan::{Plan, PlanSection, Role, memory_profile};
use ir::summary::Summary;
use serde_json::Value;

use browser::Browser;

/// Bytes that a page has at most.
const LARGEST: u64 = 3 << 20;

fn workspace(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

/// A folder below `target`.
fn folder(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("..").join(name);
    std::fs::create_dir_all(&path).unwrap();
    path.canonicalize().unwrap()
}

fn compile(example: &str, mesh: &str) -> Plan {
    let source = std::fs::read_to_string(workspace(&format!("examples/{example}.ron"))).unwrap();
    let model = ir::model::parse_with(&source, &[]).unwrap();
    let graph = ir::model::elaborate(&model, &MeshSpec::parse(mesh).unwrap()).unwrap();
    let compiled = codegen::compile(graph, &codegen::Options::default());
    compiled.unwrap_or_else(|it| panic!("{it}")).plan.into_plan()
}

/// Writes the page of a plan, for one test.
fn write(test: &str, plan: &Plan) -> PathBuf {
    let file = |extension| folder("page").join(format!("{}-{test}.{extension}", plan.name));
    let (page, program) = (file("html"), file("plan"));
    std::fs::write(&program, ir::text::print_plan(plan)).unwrap();
    let ran = Command::new(env!("CARGO_BIN_EXE_planc"))
        .args(["inspect", "-q", "--target", "h200", "--html"])
        .args([&page, &program])
        .output()
        .unwrap();
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    page
}

/// Attributes `data-..` of all elements that a selector finds.
fn data(browser: &mut Browser, selector: &str) -> Vec<Value> {
    let script =
        format!("[...document.querySelectorAll({selector:?})].map((it) => ({{...it.dataset}}))");
    browser.eval(&script).as_array().unwrap().clone()
}

fn number(it: &Value) -> u64 {
    it.as_str().and_then(|it| it.parse().ok()).unwrap_or_else(|| panic!("{it} is no number"))
}

/// What a page calls a figure.
fn figure(browser: &mut Browser, name: &str) -> f64 {
    let found = data(browser, &format!("[data-figure={name}]"));
    found[0]["value"].as_str().unwrap().parse().unwrap()
}

/// Numbers of the cells of a row with an attribute, in order.
fn cells(browser: &mut Browser, row: &str, attribute: &str) -> Vec<f64> {
    let cells = data(browser, &format!("{row} td"));
    let values = cells.iter().filter_map(|it| it.get(attribute));
    values.map(|it| it.as_str().unwrap().parse().unwrap()).collect()
}

fn check_figures(browser: &mut Browser, plan: &Plan) {
    let (summary, memory) = (Summary::of(plan), memory_profile(plan));
    let target = Target::builtin("h200").unwrap();
    let timeline = Timeline::predict(plan, &target);
    let step = figure(browser, "step-seconds");
    assert_eq!(figure(browser, "parameters"), summary.parameters as f64);
    let needed = memory.total_bytes() + target.bytes_beside_plan(plan.meeting_comms().len());
    assert_eq!(figure(browser, "memory"), needed as f64);
    assert_eq!(cells(browser, "tr[data-role=needs]", "bytes"), [needed as f64]);
    assert_eq!(figure(browser, "wire-bytes"), summary.wire_bytes() as f64);
    assert_eq!(step, timeline.step_seconds());
    assert_eq!(figure(browser, "timeline-step-seconds"), step);
    assert_eq!(figure(browser, "exposed-seconds"), timeline.exposed_seconds());
    let used = timeline.step_cost(plan, &target).of_bf16_peak;
    assert_eq!([figure(browser, "mfu"), figure(browser, "hfu")], [used.mfu, used.hfu]);
    let phases = data(browser, ".phases .phase");
    let seconds = |it: &Value| it["seconds"].as_str().unwrap().parse::<f64>().unwrap();
    let drawn: f64 = phases.iter().map(seconds).sum();
    let sections = [PlanSection::Step, PlanSection::Update].map(|it| timeline.section_seconds(it));
    assert!((drawn - sections.iter().sum::<f64>()).abs() < 1e-9 * step, "phases fill the timeline");
    let waits = cells(browser, "#waits tbody tr", "seconds").iter().sum::<f64>();
    assert!((waits - timeline.exposed_seconds()).abs() < 1e-9 * step, "waits add up");
}

fn check_memory(browser: &mut Browser, plan: &Plan) {
    let memory = memory_profile(plan);
    for role in [Role::Param, Role::State, Role::Input] {
        let of_role = plan.buffers.iter().filter(|it| it.1.role == role);
        let bytes: u64 = of_role.map(|it| plan.local_bytes(it.0)).sum();
        let row = format!("#main tr[data-role={}]", role.name());
        assert_eq!(cells(browser, &row, "bytes"), [bytes as f64], "{role:?}");
    }
    let total = memory.total_bytes() as f64;
    assert_eq!(cells(browser, "tr[data-role=total]", "bytes"), [total]);
    // By purpose and by tensor, the peak adds up to what the profile says.
    let live = memory.live_bytes as f64;
    let by_purpose = cells(browser, "tbody tr[data-purpose]", "bytes");
    assert_eq!(by_purpose.iter().sum::<f64>(), live);
    let by_tensor = cells(browser, "#peak-tensors tbody tr", "bytes");
    assert_eq!(by_tensor.iter().sum::<f64>(), live);
    let more = cells(browser, "#peak-more tbody tr", "bytes");
    if let Some(others) = by_tensor.get(10) {
        assert_eq!(more.iter().sum::<f64>(), *others, "all others are listed too");
    }
    // No product before the backward pass makes a gradient.
    let start = &data(browser, ".plot [data-phase=backward]")[0]["start"];
    let forward = &plan.section(PlanSection::Step)[..number(start) as usize];
    let products = forward.iter().filter(|it| it.name().ends_with("matmul"));
    for buffer in products.flat_map(|it| it.writes()) {
        let name = &plan.buffers[buffer].name;
        assert!(!name.contains(".grad"), "`{name}` is made in the forward pass");
    }
    let script = "(() => { const plot = document.querySelector('.plot'); return JSON.parse(document.querySelector(\
                  '#memory-chart script').textContent)[+plot.dataset.peak].slice(1).reduce((a, b) => a + b) })()";
    assert_eq!(browser.eval(script).as_f64(), Some(live), "the curve is as high at its peak");
}

fn check_collectives(browser: &mut Browser, plan: &Plan) {
    let mut expect: BTreeMap<(String, String), [f64; 3]> = BTreeMap::new();
    for it in Summary::of(plan).collectives {
        let axes = it.axes.replace("tp_kv, tp_rep", "tp");
        let total = expect.entry((axes, it.kind.to_string())).or_default();
        for (total, part) in total.iter_mut().zip([it.count, it.bytes, it.wire_bytes]) {
            *total += part as f64;
        }
    }
    let rows = data(browser, "#collectives-table tbody tr");
    assert_eq!(rows.len(), expect.len());
    for ((axes, kind), [count, bytes, wire]) in expect {
        let row = format!("#collectives-table tr[data-axes='{axes}'][data-kind={kind}]");
        assert_eq!(cells(browser, &row, "count"), [count], "{kind} over {axes}");
        assert_eq!(cells(browser, &row, "bytes"), [bytes, wire], "{kind} over {axes}");
        assert!(cells(browser, &row, "seconds")[0] > 0.0, "{kind} over {axes} takes time");
    }
}

/// `0-3, 8`, and whether that is all.
fn parse_ranks(text: &str) -> (Vec<u64>, bool) {
    let (text, is_all) = match text.split_once(" and ") {
        Some((listed, _)) => (listed, false),
        None => (text, true),
    };
    let range = |it: &str| {
        let (a, b) = it.split_once('-').unwrap_or((it, it));
        a.parse::<u64>().unwrap()..=b.parse::<u64>().unwrap()
    };
    (text.split(", ").flat_map(range).collect(), is_all)
}

/// Every box of a picture is one that its ranks hold, with its bytes; and if all are drawn, all that they hold.
fn check_placements(browser: &mut Browser, plan: &Plan) {
    let script = "[...document.querySelectorAll('[aria-labelledby=parameters] .card')].map((card) => ({...card.dataset, \
                  folded: !!card.querySelector('.folded'), boxes: [...card.querySelectorAll('.cell')].map((it) => \
                  ({...it.dataset}))}))";
    let cards = browser.eval(script);
    let mut n_params = 0;
    for card in cards.as_array().unwrap() {
        let name = card["tensor"].as_str().unwrap().replacen('*', "0", 1);
        n_params += number(&card["n"]);
        let data = &plan.buffers[plan.buffer(&name).unwrap_or_else(|| panic!("no `{name}`"))];
        let element = data.ty.dtype.bytes();
        let boxes_of = |rank: u64| -> BTreeSet<(String, u64)> {
            let coord = plan.mesh.coord_of(rank);
            let chunks = data.sharding.chunks(&data.ty.shape, &plan.mesh, &coord);
            let text = |it: &ir::placement::Chunk| {
                let dims = it.offsets.iter().zip(&it.sizes);
                let dims: Vec<String> = dims.map(|(a, n)| format!("[{a},{})", a + n)).collect();
                (dims.join(" × "), it.sizes.iter().product::<u64>() * element)
            };
            chunks.iter().map(text).collect()
        };
        let mut drawn: BTreeMap<u64, BTreeSet<(String, u64)>> = BTreeMap::new();
        let mut complete = card["folded"] == false;
        for it in card["boxes"].as_array().unwrap() {
            let (ranks, is_all) = parse_ranks(it["ranks"].as_str().unwrap());
            complete &= is_all;
            let drawn_box = (it["box"].as_str().unwrap().to_string(), number(&it["bytes"]));
            for rank in ranks {
                assert!(
                    boxes_of(rank).contains(&drawn_box),
                    "{name}: rank {rank} has no {drawn_box:?}"
                );
                drawn.entry(rank).or_default().insert(drawn_box.clone());
            }
        }
        assert!(!drawn.is_empty(), "{name} has a picture");
        if complete {
            for rank in 0..plan.mesh.n_ranks() {
                assert_eq!(
                    drawn.remove(&rank).unwrap_or_default(),
                    boxes_of(rank),
                    "{name}: {rank}"
                );
            }
        }
    }
    assert_eq!(n_params, plan.params.len() as u64, "every parameter is there once");
}

fn check_state(browser: &mut Browser, plan: &Plan) {
    let layout = CheckpointLayout::of(plan).unwrap();
    let bytes: u64 = layout.entries.iter().map(|it| it.ty.n_elements() * it.ty.dtype.bytes()).sum();
    let row = "#checkpoint-table tr[data-kind=all]";
    assert_eq!(cells(browser, row, "count"), [layout.entries.len() as f64]);
    assert_eq!(cells(browser, row, "bytes"), [bytes as f64]);
    let written = cells(browser, "#files-table tbody tr", "bytes");
    if written.len() as u64 == plan.mesh.n_ranks() {
        assert_eq!(written.iter().sum::<f64>(), bytes as f64, "files hold every byte once");
    }
    let operands: u64 =
        data(browser, "#amax-table tbody tr").iter().map(|it| number(&it["n"])).sum();
    assert_eq!(operands, 2 * scaled_gemms(plan).len() as u64, "every operand of a GEMM on codes");
}

/// All facts of a page, and that it fits its window.
fn check(browser: &mut Browser, example: &str, mesh: &str) -> Plan {
    let plan = compile(example, mesh);
    let path = write("facts", &plan);
    let size = std::fs::metadata(&path).unwrap().len();
    assert!(size < LARGEST, "the page of {example} on {mesh} has {size} bytes");
    for width in [2560, 1400, 400] {
        browser.open(&path, width, 1000);
        let wide = browser.eval("document.documentElement.scrollWidth - innerWidth");
        assert!(
            wide.as_f64() <= Some(0.0),
            "{example} is {wide} pixels wider than a window of {width}"
        );
        // Nothing of a wide window is left empty beside figures, charts and cards.
        for it in [".tiles", ".plot", ".overview", ".cards"] {
            let free = format!(
                "innerWidth - document.querySelector('{it}').getBoundingClientRect().right"
            );
            let free = browser.eval(&free).as_f64();
            assert!(free <= Some(40.0), "`{it}` leaves {free:?} of {width} pixels");
        }
    }
    browser.open(&path, 1400, 1000);
    check_figures(browser, &plan);
    check_memory(browser, &plan);
    check_collectives(browser, &plan);
    check_placements(browser, &plan);
    check_state(browser, &plan);
    assert_eq!(browser.said, [""; 0], "{example} on {mesh}");
    plan
}

#[test]
fn pages_say_what_plans_say() {
    let mut browser = Browser::start(&folder("page").join("browser-facts"));
    check(&mut browser, "llama-tiny", "2x4");
    let plan = check(&mut browser, "llama-tiny-fp8", "2x2x2");
    assert_ne!(scaled_gemms(&plan), [], "the FP8 example has amax groups");
    check(&mut browser, "mlp", "8");
    check(&mut browser, "llama3-8b", "2x4");
    let plan = check(&mut browser, "llama3-405b", "2048x8");
    let layers = data(&mut browser, "details.layer");
    assert_eq!(layers[0]["layers"], "126", "all layers are one");
    let empty =
        data(&mut browser, "[data-tensor='model.layers.*.mlp.up_proj.weight'] [data-empty]");
    let data = &plan.buffers[plan.buffer("model.layers.0.mlp.up_proj.weight").unwrap()];
    let holds_nothing =
        |coord: &_| data.sharding.chunks(&data.ty.shape, &plan.mesh, coord).is_empty();
    let n_empty = plan.mesh.coords().filter(|it| holds_nothing(it)).count() as u64;
    assert_eq!(number(&empty[0]["empty"]), n_empty);
    let rects = browser.eval("document.querySelectorAll('*').length");
    assert!(rects.as_f64() < Some(10_000.0), "{rects} elements are a page that scrolls slowly");
}

#[test]
fn a_page_works_from_the_keyboard_and_with_a_mouse() {
    let page = write("keys", &compile("llama-tiny", "2x4"));
    let mut browser = Browser::start(&folder("page").join("browser-keys"));
    let browser = &mut browser;
    browser.open(&page, 1400, 1000);
    let readout =
        "document.activeElement.closest('.card, figure').querySelector('.readout').textContent";
    let focused = "document.activeElement.id || document.activeElement.className.toString()";

    // The first Tab leads past the list of sections, then come links.
    browser.key("Tab");
    assert_eq!(browser.eval("document.activeElement.textContent"), "Skip to the report");

    // The embedding is [256, 64] in f32 as [tp.dp, _]: 32 rows each, in the order 0, 4, 1, ..
    browser.eval("document.querySelector('#p0-0-0').focus()");
    assert_eq!(browser.eval(readout), "rank 0: [0,32) × [0,64), 8.00 KiB");
    browser.key("ArrowDown");
    assert_eq!(browser.eval(focused), "p0-1-0");
    assert_eq!(browser.eval(readout), "rank 4: [32,64) × [0,64), 8.00 KiB");
    browser.key("End");
    assert_eq!(browser.eval(readout), "rank 7: [224,256) × [0,64), 8.00 KiB");
    assert_eq!(browser.eval("document.querySelectorAll('#p0-0-0[tabindex=\"-1\"]').length"), 1);
    browser.point_at("#p0-2-0");
    assert_eq!(browser.eval(readout), "rank 1: [64,96) × [0,64), 8.00 KiB");

    let says = |browser: &mut Browser, chart: &str| {
        let script = format!("document.querySelector('{chart} .readout').textContent");
        browser.eval(&script).as_str().unwrap().to_string()
    };
    browser.eval("document.querySelector('.plot').focus()");
    let at_peak = says(browser, "#memory-chart");
    browser.key("ArrowRight");
    let next = says(browser, "#memory-chart");
    browser.key("p");
    assert_ne!(at_peak, next);
    assert_eq!(says(browser, "#memory-chart"), at_peak);
    browser.key("Home");
    assert!(
        says(browser, "#memory-chart").starts_with("step 1: "),
        "{}",
        says(browser, "#memory-chart")
    );

    browser.eval("document.querySelector('.detail').focus()");
    browser.key("Home");
    let first = says(browser, "#timeline-chart");
    assert!(first.starts_with("s0 compute · ") && first.contains(" from "), "{first}");
    browser.key("ArrowRight");
    let second = says(browser, "#timeline-chart");
    assert_ne!(first, second);
    browser.key("ArrowDown");
    assert!(
        says(browser, "#timeline-chart").starts_with("s1 "),
        "{}",
        says(browser, "#timeline-chart")
    );
    browser.key("ArrowUp");
    browser.key("ArrowLeft");
    assert_eq!(browser.eval(focused), "detail");
    browser.eval("document.querySelector('.overview').focus()");
    let window =
        |browser: &mut Browser| browser.eval("document.querySelector('.window').style.width");
    let before = window(browser);
    browser.key("-");
    assert_ne!(window(browser), before, "a longer stretch is shown");

    // A box has an address.
    let url = format!("file://{}#p0-3-0", page.display());
    browser.eval(&format!("location.href = {url:?}, new Promise((it) => setTimeout(it, 100))"));
    assert_eq!(browser.eval(focused), "p0-3-0");
    assert_eq!(browser.said, [""; 0]);
}

/// Headings in order, names for what can be focused, captions or headings for tables.
#[test]
fn a_page_can_be_read_without_looking() {
    let page = write("names", &compile("llama-tiny-fp8", "2x2x2"));
    let mut browser = Browser::start(&folder("page").join("browser-names"));
    browser.open(&page, 1400, 1000);
    let nameless = "[...document.querySelectorAll('[tabindex], svg[role], [role=img]')].filter((it) => it.id !== 'main' \
                    && !it.getAttribute('aria-label')).length";
    assert_eq!(browser.eval(nameless), 0);
    let tables = "[...document.querySelectorAll('table')].filter((it) => !it.querySelector('thead th[scope=col]') || \
                  [...it.querySelectorAll('tbody tr')].some((row) => row.children.length < 2 && !row.querySelector('[colspan]'))).length";
    assert_eq!(browser.eval(tables), 0);
    let levels = "(() => { let last = 0; return [...document.querySelectorAll('h1, h2, h3')].filter((it) => { const jumps = \
                  +it.tagName[1] > last + 1; last = +it.tagName[1]; return jumps }).length })()";
    assert_eq!(browser.eval(levels), 0);
    assert_eq!(browser.eval("document.querySelectorAll('h1').length"), 1);
    let ids = "(() => { const ids = [...document.querySelectorAll('[id]')].map((it) => it.id); return ids.length - new \
               Set(ids).size })()";
    assert_eq!(browser.eval(ids), 0, "an id is there twice");
    assert_eq!(browser.said, [""; 0]);
}

/// Leaves pictures of pages in `target/page`, light, dark, narrow and printed, for people to look at, and how
/// many milliseconds Chromium took to open them: until all is loaded and the script is done, and until
/// something is to be seen.
#[test]
fn pictures_of_pages() {
    let mut browser = Browser::start(&folder("page").join("browser-pictures"));
    let pictures = folder("page");
    let mut times = String::new();
    for (example, mesh) in [("llama3-8b", "2x4"), ("llama3-405b", "2048x8")] {
        let page = write("pictures", &compile(example, mesh));
        for (name, colors, width) in
            [("light", "light", 1280), ("dark", "dark", 1280), ("narrow", "light", 420)]
        {
            browser.prefer(colors);
            browser.open(&page, width, 3000);
            let paint = "new Promise((it) => requestAnimationFrame(() => setTimeout(() => it([performance\
                         .getEntriesByType('navigation')[0].loadEventEnd, performance.getEntriesByName(\
                         'first-contentful-paint')[0]?.startTime, performance.getEntriesByName('script')[0].duration]))))";
            let [loaded, painted, script] = [0, 1, 2].map(|it| browser.eval(paint)[it].clone());
            times.push_str(&format!(
                "{example} {name}: loaded {loaded}, painted {painted}, script {script}\n"
            ));
            let path = pictures.join(format!("{example}-{name}.png"));
            browser.screenshot(&path);
            let png = std::fs::read(&path).unwrap();
            assert!(png.starts_with(b"\x89PNG") && png.len() > 20_000, "{}", path.display());
            let background = browser.eval("getComputedStyle(document.body).backgroundColor");
            let is_dark = background.as_str().is_some_and(|it| it.starts_with("rgb(20"));
            assert_eq!(is_dark, colors == "dark", "{example} is {background} in {colors}");
        }
        let pdf = browser.print();
        assert!(pdf.starts_with(b"%PDF"), "{example} prints");
        std::fs::write(pictures.join(format!("{example}.pdf")), pdf).unwrap();
    }
    std::fs::write(pictures.join("times.txt"), times).unwrap();
    assert_eq!(browser.said, [""; 0]);
}
