//! From a graph to something that runs: operators chosen for the shapes that come in.

use std::sync::{Arc, Mutex, PoisonError};

use tract_onnx::prelude::*;
use tract_onnx::tract_hir::infer::Factoid;

/// Plans for so many shapes are kept, where each needs one of its own.
const MOST_PLANS: usize = 16;

/// A graph for certain shapes, ready to run.
pub(crate) type Plan = Arc<TypedRunnableModel>;

/// The shapes of all inputs.
type Shapes = Vec<Vec<usize>>;

/// The plans of one graph.
pub(crate) struct Plans {
    graph: InferenceModel,
    types: Vec<DatumType>,
    /// For the smallest inputs: every length that is free is 1.
    pub(crate) smallest: Plan,
    smallest_shapes: Shapes,
    /// For any lengths; not every graph can be planned without knowing them.
    any: Option<Plan>,
    /// For certain lengths, the ones used last at the end.
    others: Mutex<Vec<(Shapes, Plan)>>,
}

impl Plans {
    /// Plans a graph whose inputs have these types and shapes.
    pub(crate) fn new(
        graph: InferenceModel,
        inputs: &[(DatumType, Vec<Option<usize>>)],
    ) -> TractResult<Self> {
        let types: Vec<DatumType> = inputs.iter().map(|(datum, _)| *datum).collect();
        let ones =
            |shape: &Vec<Option<usize>>| shape.iter().map(|side| side.unwrap_or(1)).collect();
        let smallest_shapes: Shapes = inputs.iter().map(|(_, shape)| ones(shape)).collect();
        let smallest = plan(&graph, &types, &smallest_shapes)?;
        let free = inputs.iter().any(|(_, shape)| shape.contains(&None));
        let any = if free { plan_for_any(&graph).ok() } else { None };
        Ok(Self { graph, types, smallest, smallest_shapes, any, others: Mutex::default() })
    }

    /// Runs the graph.
    pub(crate) fn run(&self, inputs: TVec<TValue>) -> TractResult<TVec<TValue>> {
        let shapes: Shapes = inputs.iter().map(|input| input.shape().to_vec()).collect();
        if shapes == self.smallest_shapes {
            return self.smallest.run(inputs);
        }
        if let Some(any) = &self.any
            && let Ok(outputs) = any.run(inputs.clone())
        {
            return Ok(outputs);
        }
        self.plan_for(shapes)?.run(inputs)
    }

    fn plan_for(&self, shapes: Shapes) -> TractResult<Plan> {
        let known = {
            let mut others = self.others.lock().unwrap_or_else(PoisonError::into_inner);
            let at = others.iter().position(|(known, _)| *known == shapes);
            at.map(|at| {
                let found = others.remove(at);
                let plan = found.1.clone();
                others.push(found);
                plan
            })
        };
        if let Some(plan) = known {
            return Ok(plan);
        }
        // Not under the lock: it can take a while, and others ask for other shapes.
        let made = plan(&self.graph, &self.types, &shapes)?;
        let mut others = self.others.lock().unwrap_or_else(PoisonError::into_inner);
        if others.len() >= MOST_PLANS {
            others.remove(0);
        }
        others.push((shapes, made.clone()));
        Ok(made)
    }
}

fn plan(graph: &InferenceModel, types: &[DatumType], shapes: &Shapes) -> TractResult<Plan> {
    let mut graph = graph.clone();
    for (at, (datum, shape)) in types.iter().zip(shapes).enumerate() {
        graph.set_input_fact(at, InferenceFact::dt_shape(*datum, shape.iter().copied()))?;
    }
    graph.into_optimized()?.into_runnable()
}

fn plan_for_any(graph: &InferenceModel) -> TractResult<Plan> {
    let mut graph = graph.clone();
    for at in 0..graph.input_outlets()?.len() {
        let mut fact = graph.input_fact(at)?.clone();
        for side in 0..fact.shape.dims().count() {
            if fact.shape.dim(side).is_some_and(|dim| dim.concretize().is_none()) {
                let symbol = graph.symbols.new_with_prefix("n");
                fact.shape.set_dim(side, symbol.into());
            }
        }
        graph.set_input_fact(at, fact)?;
    }
    graph.into_optimized()?.into_runnable()
}
