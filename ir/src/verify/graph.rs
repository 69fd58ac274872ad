//! Invariants of a [`Graph`].
//!
//! In every phase:
//! * Handles are in range, and a result's value names the node and index that make it.
//! * The order lists each node once; a node comes after those that make its operands; sections are
//!   contiguous and in order. Values have distinct names.
//! * The types of results are those that the op infers. A store is of a state or parameter, of its
//!   type, not before its value is made, and at most one a section.
//! * Numbers of inits, of the optimizer and of the run are those that a model may have. An alias is the name of
//!   nothing else.
//!
//! From `Sharded` on:
//! * Every value has a sharding, valid for its shape.
//! * The operands of each op agree on how its factors are sharded, and its results are sharded as
//!   follows; so a partial value meets linear ops only. `reshard` alone is exempt.
//! * A state and what is stored to it are laid out alike. Results are whole on every rank.
//!
//! From `Explicit` on there is no `reshard`, before it no collective; every part of a collective is the
//! step that its kind and axes say.
//!
//! From `Local` on, ops also type-check on what one rank holds.

use cranelift_entity::{EntityRef, SecondaryMap};
use rustc_hash::{FxBuildHasher, FxHashSet};
use smallvec::SmallVec;

use crate::Phase;
use crate::graph::{Def, Graph, Node, Section, Store, Value};
use crate::model::{check_run, check_training};
use crate::ops::Op;
use crate::types::TensorType;
use crate::verify::op::{Attributes, Checker, Class, types_error};
use crate::verify::params::{Declared, faults};
use crate::verify::{Place, VerifyError};

/// Every broken invariant. See the [module docs](self).
pub fn verify(graph: &Graph) -> Vec<VerifyError> {
    let mut cx = Cx { graph, errors: Vec::new() };
    cx.handles();
    if cx.errors.is_empty() {
        cx.order();
        cx.stores();
        cx.declared();
        match graph.phase < Phase::Sharded {
            true => cx.types(),
            false => cx.placement(),
        }
    }
    cx.errors
}

struct Cx<'a> {
    graph: &'a Graph,
    errors: Vec<VerifyError>,
}

impl<'a> Cx<'a> {
    fn fail(&mut self, place: Place, context: String, message: String) {
        self.errors.push(VerifyError { property: None, place, context, message });
    }

    fn program(&mut self, message: String) {
        self.fail(Place::Program, String::new(), message);
    }

    fn value(&mut self, value: Value, message: String) {
        let data = &self.graph.values[value];
        let place = Place::Value(data.name.clone());
        self.fail(place, data.ty.to_string(), message);
    }

    fn node(&mut self, index: usize, message: String) {
        let node = self.graph.order[index];
        let place = Place::Node { section: self.graph.nodes[node].section, index };
        self.fail(place, show(self.graph, node), message);
    }

    fn handles(&mut self) {
        let graph = self.graph;
        let is_value = |it: Value| it.index() < graph.values.len();
        let mut errors = Vec::new();
        for (index, &node) in graph.order.iter().enumerate() {
            let Some(data) = graph.nodes.get(node) else {
                errors.push(format!("order entry {index} is {node}, which does not exist"));
                continue;
            };
            if !data.inputs.iter().chain(&data.results).all(|&it| is_value(it)) {
                errors.push(format!("{node} names a value that does not exist"));
                continue;
            }
            if data.scope.index() >= graph.scopes.len() {
                errors.push(format!("{node} is of a module that does not exist"));
            }
            for (i, &result) in data.results.iter().enumerate() {
                if graph.values[result].def != (Def::Result { node, index: i as u32 }) {
                    let name = &graph.values[result].name;
                    errors.push(format!("result {i} of {node}, %{name}, names another maker"));
                }
            }
        }
        let stored = graph.stores.iter().flat_map(|it| [it.state, it.value]);
        let params = graph.params.iter().flat_map(|it| [it.value, it.compute, it.full]);
        let results = graph.results.iter().map(|it| it.1);
        let grads = graph.params.iter().filter_map(|it| it.grad);
        if !stored.chain(params).chain(results).chain(grads).all(is_value) {
            errors.push("a store, parameter or result names a value that does not exist".into());
        }
        errors.into_iter().for_each(|it| self.program(it));
    }

    fn order(&mut self) {
        let graph = self.graph;
        let mut made: SecondaryMap<Value, bool> = SecondaryMap::new();
        let mut seen: SecondaryMap<Node, bool> = SecondaryMap::new();
        let mut names: FxHashSet<&str> =
            FxHashSet::with_capacity_and_hasher(graph.values.len(), FxBuildHasher);
        let mut section = Section::Prepare;
        let leaves = graph.values.iter().filter(|it| !matches!(it.1.def, Def::Result { .. }));
        for (value, data) in leaves {
            made[value] = true;
            if !names.insert(&data.name) {
                self.value(value, "another value has this name".into());
            }
        }
        for (index, &node) in graph.order.iter().enumerate() {
            let data = &graph.nodes[node];
            if std::mem::replace(&mut seen[node], true) {
                self.node(index, "the node is listed twice".into());
            }
            if data.section < section {
                self.node(index, format!("comes after a node of {section:?}"));
            }
            section = section.max(data.section);
            for &input in data.inputs.iter().filter(|&&it| !made[it]) {
                self.node(index, format!("reads %{} before it is made", graph.values[input].name));
            }
            for &result in &data.results {
                made[result] = true;
                if !names.insert(&graph.values[result].name) {
                    self.value(result, "another value has this name".into());
                }
            }
        }
        for root in graph.roots().filter(|&it| !made[it]) {
            self.value(root, "is stored or a result, and nothing makes it".into());
        }
    }

    fn stores(&mut self) {
        let graph = self.graph;
        let mut seen = FxHashSet::default();
        for store in &graph.stores {
            let value = &graph.values[store.value];
            match graph.values[store.state].def {
                Def::Param | Def::State => {}
                Def::Sum => self.sum(store),
                Def::Input | Def::Result { .. } => {
                    self.value(store.state, format!("is stored %{}, and is no state", value.name));
                }
            }
            if graph.values[store.state].ty != value.ty {
                self.value(store.state, format!("is stored %{} : {}", value.name, value.ty));
            }
            if graph.section(store.value) > store.section {
                let message = format!("is stored %{}, before it is made", value.name);
                self.value(store.state, message);
            }
            if !seen.insert((store.state, store.section)) {
                self.value(store.state, format!("is stored twice in {:?}", store.section));
            }
            if graph.phase >= Phase::Sharded && graph.values[store.state].sharding != value.sharding
            {
                let message = format!("is stored %{}, which is laid out differently", value.name);
                self.value(store.state, message);
            }
        }
    }

    /// Checks the declarations besides the program: parameters, the optimizer, and the run.
    fn declared(&mut self) {
        let graph = self.graph;
        let declared: Vec<Declared<'_>> = graph
            .params
            .iter()
            .map(|it| Declared {
                name: &graph.values[it.value].name,
                init: &it.init,
                aliases: &it.aliases,
            })
            .collect();
        for (index, message) in faults(&declared) {
            let place = Place::Param(declared[index].name.to_string());
            self.fail(place, String::new(), message);
        }
        let training = check_training(graph.training.optimizer, graph.training.clip_norm);
        let checks = [(Place::Program, training), (Place::Run, check_run(&graph.run))];
        for (place, error) in checks.into_iter().filter_map(|(place, it)| Some((place, it.err()?)))
        {
            self.fail(place, String::new(), error.to_string());
        }
    }

    /// Checks a sum over micro-batches: the stored value adds something to it, and only `Update` reads it besides.
    fn sum(&mut self, store: &Store) {
        let graph = self.graph;
        let adder = graph.producer(store.value).map(|it| &graph.nodes[it]);
        let adds = adder.is_some_and(|it| {
            let mut operands = (0..it.inputs.len()).filter(|&i| it.inputs[i] == store.state);
            let operand = operands.next().filter(|_| operands.next().is_none());
            operand.is_some_and(|i| it.inputs.len() > 1 && it.op.without(i).is_some())
        });
        if store.section != Section::Backward || !adds {
            let name = &graph.values[store.value].name;
            let message = format!("is a sum over micro-batches, and %{name} does not add to it");
            self.value(store.state, message);
        }
        let reads = graph.order.iter().map(|&it| &graph.nodes[it]);
        let reads =
            reads.filter(|it| it.section != Section::Update && it.inputs.contains(&store.state));
        if reads.count() > 1 {
            let message = "is a sum over micro-batches, and read before it is done".to_string();
            self.value(store.state, message);
        }
    }

    /// Types, where values need not have a sharding yet.
    fn types(&mut self) {
        let graph = self.graph;
        for (value, data) in &graph.values {
            let sharding = data.sharding.as_ref();
            if let Some(Err(error)) = sharding.map(|it| it.validate(&data.ty.shape, &graph.mesh)) {
                self.value(value, error.to_string());
            }
        }
        for (index, &node) in graph.order.iter().enumerate() {
            let data = &graph.nodes[node];
            let inputs: SmallVec<[&TensorType; 4]> =
                data.inputs.iter().map(|&it| graph.ty(it)).collect();
            let results = data.results.iter().map(|&it| graph.ty(it));
            if matches!(data.op, Op::Collective(_)) {
                self.node(index, "a collective before shardings are settled".into());
            }
            if let Some(error) = types_error(&data.op, &inputs, results, "") {
                self.node(index, error);
            }
        }
    }

    /// Types and shardings.
    fn placement(&mut self) {
        let graph = self.graph;
        let attributes =
            if graph.phase >= Phase::Local { Attributes::Local } else { Attributes::Global };
        let mut checker = Checker::new(&graph.mesh, attributes);
        let mut class_of: SecondaryMap<Value, Option<Class>> = SecondaryMap::new();
        class_of.resize(graph.values.len());
        let made = graph.order.iter().flat_map(|&it| &graph.nodes[it].results).copied();
        let leaves = graph.values.iter().filter(|it| !matches!(it.1.def, Def::Result { .. }));
        for value in leaves.map(|it| it.0).chain(made) {
            let data = &graph.values[value];
            match data.sharding.as_ref().map(|it| checker.class(&data.ty, it)) {
                Some(Ok(class)) => class_of[value] = Some(class),
                Some(Err(error)) => self.value(value, error.to_string()),
                None => self.value(value, "has no sharding".into()),
            }
        }
        for index in 0..graph.order.len() {
            self.node_placement(index, &class_of, &mut checker);
        }
        for &(_, value) in &graph.results {
            let sharding = graph.values[value].sharding.as_ref();
            if sharding.is_some_and(|it| !it.sharded_axes().union(it.partial_axes()).is_empty()) {
                self.value(value, "is a result, and not whole on every rank".into());
            }
        }
    }

    fn node_placement(
        &mut self,
        index: usize,
        class_of: &SecondaryMap<Value, Option<Class>>,
        checker: &mut Checker<'a>,
    ) {
        let graph = self.graph;
        let data = &graph.nodes[graph.order[index]];
        let classes = |of: &[Value]| -> Option<SmallVec<[Class; 4]>> {
            of.iter().map(|&it| class_of[it]).collect()
        };
        // What has no valid sharding is reported already.
        let (Some(inputs), Some(results)) = (classes(&data.inputs), classes(&data.results)) else {
            return;
        };
        let explicit = graph.phase >= Phase::Explicit;
        match &data.op {
            Op::Reshard(_) if explicit => self.node(index, "data moves in a `reshard`".into()),
            Op::Collective(_) if !explicit => {
                self.node(index, "a collective before its time".into())
            }
            Op::Collective(op) => {
                if inputs.len() != results.len() {
                    self.node(index, "has not one result for each operand".into());
                }
                for (&from, &to) in inputs.iter().zip(&results) {
                    if let Some(error) = checker.part(op.kind, op.axes, from, to) {
                        let error = error.message.clone();
                        self.node(index, error);
                    }
                }
            }
            op => {
                for error in checker.op(op, &inputs, &results) {
                    self.errors.push(VerifyError {
                        property: None,
                        place: Place::Node { section: data.section, index },
                        context: show(graph, graph.order[index]),
                        message: error.message.clone(),
                    });
                }
            }
        }
    }
}

/// `%c = add %a, %b`.
fn show(graph: &Graph, node: Node) -> String {
    let data = &graph.nodes[node];
    let names = |it: &[Value]| {
        let names = it.iter().map(|&it| format!("%{}", graph.values[it].name));
        names.collect::<Vec<_>>().join(", ")
    };
    let inputs = names(&data.inputs);
    let space = if inputs.is_empty() { "" } else { " " };
    format!("{} = {}{space}{inputs}", names(&data.results), data.op.to_text())
}
