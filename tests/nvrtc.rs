//! Every CUDA kernel that a check of ops runs on a GPU compiles, for the GPU that planc is made for.
//!
//! Needs NVRTC and no GPU. `tests/nvrtc.sh` gets it from PyPI and prints its folder.

use std::collections::BTreeSet;

use kernels::cuda::{DEFAULT_ARCH, Function, SOURCES, Work, transport};
use runtime::backend::cuda::{check, module, nvrtc};

fn functions() -> BTreeSet<Function> {
    let mut res = BTreeSet::new();
    for (name, program) in check::programs() {
        let program = program.unwrap_or_else(|why| panic!("{name}: {why}"));
        program.work.iter().for_each(|it| add_functions(it, &mut res));
    }
    // What is around collectives is of no op.
    res.extend(transport::functions());
    res
}

fn add_functions(work: &Work, functions: &mut BTreeSet<Function>) {
    match work {
        Work::Launch(it) => {
            functions.insert(it.function.clone());
        }
        Work::Attention(it) => it.fallback.iter().for_each(|it| add_functions(it, functions)),
        Work::Gemm(_) | Work::Fill { .. } | Work::Copy { .. } => (),
    }
}

#[test]
fn every_kernel_compiles() {
    let compiler = nvrtc::Compiler::get().unwrap_or_else(|it| {
        panic!(
            "{it}\nThis test needs NVRTC, and no GPU: run ./test.sh, or\n  \
             LD_LIBRARY_PATH=$(tests/nvrtc.sh) cargo test -p tests --test nvrtc"
        )
    });
    let functions = functions();
    let all: Vec<&Function> = functions.iter().collect();
    println!("{} functions, NVRTC {:?}", all.len(), compiler.version);
    if module::cubins(&all, DEFAULT_ARCH).is_ok() {
        return;
    }
    // Each is compiled by now, or has failed.
    let errors = all.iter().filter_map(|it| module::cubins(&[it], DEFAULT_ARCH).err());
    let errors: Vec<String> = errors.map(|it| it.to_string()).collect();
    panic!("{} of {} kernels do not compile:\n{}", errors.len(), all.len(), errors.join("\n\n"));
}

/// A source that no op uses is not checked by anything.
#[test]
fn every_source_is_used() {
    let used: BTreeSet<&str> = functions().iter().map(|it| it.source).collect();
    let listed: BTreeSet<&str> = SOURCES.iter().map(|it| it.0).collect();
    assert_eq!(used, listed);
}

/// The compiler's message names the place, so that whoever writes a kernel finds it.
#[test]
fn errors_have_the_log() {
    let function =
        Function { source: "wrong.cu", defines: vec!["N=3".to_string()], entry: "wrong" };
    let source = nvrtc::Source {
        function: &function,
        text: "#include \"a.cuh\"\nextern \"C\" __global__ void wrong(int *p) { *p = N + missing; }",
        headers: &[("a.cuh", "// Nothing.")],
        arch: DEFAULT_ARCH,
    };
    let compiler = nvrtc::Compiler::get().expect("NVRTC; see every_kernel_compiles");
    let error = compiler.compile(&source).expect_err("`missing` is not declared");
    assert_eq!(error.code(), "PL0550");
    let text = error.to_string();
    assert!(text.contains("wrong.cu: wrong (N=3)") && text.contains("wrong.cu(2)"), "{text}");
    assert!(text.contains("\"missing\" is undefined"), "{text}");
}
